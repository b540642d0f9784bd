package hostmount

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cubelet/internal/durable"
)

// Config tells where the namespace is pinned.
type Config struct {
	Dir string // absolute; see the package comment
	Log *slog.Logger

	deadline time.Duration           // of each step; zero: stepDeadline
	hook     func(step string) error // called before each step, for tests
}

const (
	stepDeadline = 5 * time.Second
	// markerEnv tells a process that was started anew inside the namespace which one it
	// is in: PID:identity. Children that inherit it have other PIDs.
	markerEnv = "CUBELET_MNTNS"
)

// Inside reports whether this process is in the namespace that is pinned in dir, or was
// put into an unpinned one by Enter.
func Inside(dir string) bool {
	own, err := ownNamespace()
	if err != nil {
		return false
	}
	if marker() == own {
		return true
	}
	b, err := os.ReadFile(filepath.Join(dir, idName))
	return err == nil && strings.TrimSpace(string(b)) == own
}

// Enter puts the program into the pinned namespace, which it makes when there is none.
// For that it starts this program anew, with the same process ID, arguments, environment
// and working directory, so it must be called before anything else is set up; it returns
// nil when the program is inside already.
//
// Enter never blocks for more than a few seconds. When the namespace cannot be pinned or
// entered, the program goes into a private namespace that ends with it; when even that
// fails, Enter returns the error and the program is where it was. A daemon without its
// namespace runs, but its mounts are the host's.
func Enter(cfg Config) error {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.deadline == 0 {
		cfg.deadline = stepDeadline
	}
	if Inside(cfg.Dir) {
		return nil
	}
	if marker() != "" {
		return errors.New("mount namespace: this program was put into another one than it is in now")
	}
	self, err := thisProgram()
	if err != nil {
		return fmt.Errorf("mount namespace: %w", err)
	}
	e := &entry{cfg: cfg, self: self}
	err = e.pinned()
	cfg.Log.Warn("mount namespace cannot be kept over a restart, using one that ends with this daemon", "err", err)
	unpinned := e.move("unshare", unshareMounts)
	return fmt.Errorf("mount namespace: %w", errors.Join(err, unpinned))
}

// Release unpins the namespace. It ends, with all its mounts, when the last process in it
// does. Call it from the host's namespace, where the pin is; no pin is no error.
func Release(dir string) error {
	pin := filepath.Join(dir, pinName)
	// Once more after DIR's own mount, which may have hidden another pin.
	for _, path := range [...]string{pin, dir, pin} {
		if err := unmountAll(path); err != nil {
			return fmt.Errorf("release mount namespace: %w", err)
		}
	}
	for _, name := range [...]string{pinName, idName, lockName} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("release mount namespace: %w", err)
		}
	}
	return nil
}

// marker returns the identity in the environment when it was set for this very process.
func marker() string {
	pid, id, _ := strings.Cut(os.Getenv(markerEnv), ":")
	if pid != strconv.Itoa(os.Getpid()) {
		return ""
	}
	return id
}

// pinned enters the pinned namespace. It returns only with an error.
func (e *entry) pinned() error {
	if err := e.step("prepare", e.prepare); err != nil {
		return err
	}
	defer e.lock.Close() // on success it ends with the old program
	ns, err := e.openPin()
	if err == nil {
		return e.move("enter", func() error { return unix.Setns(int(ns.Fd()), unix.CLONE_NEWNS) })
	}
	e.cfg.Log.Info("making the daemon's mount namespace", "dir", e.cfg.Dir, "reason", err)
	return e.move("create", e.create)
}

// prepare makes the directory, takes its lock and makes it a private mount.
func (e *entry) prepare() error {
	dir := e.cfg.Dir
	if err := durable.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	lock, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	if err := durable.Flock(context.Background(), lock, e.cfg.deadline); err != nil {
		return errors.Join(err, lock.Close())
	}
	mounted, err := isMountRoot(dir)
	if err == nil && !mounted {
		err = unix.Mount(dir, dir, "", unix.MS_BIND, "")
	}
	if err == nil {
		err = unix.Mount("", dir, "", unix.MS_PRIVATE, "")
	}
	if err != nil {
		return errors.Join(fmt.Errorf("private mount at %s: %w", dir, err), lock.Close())
	}
	e.lock = lock
	return nil
}
