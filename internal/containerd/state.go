package containerd

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

const (
	bootIDSource = "/proc/sys/kernel/random/boot_id"
	bootIDFile   = "boot_id"
)

// lockRoot keeps two daemons from one root. Without it the second would wait for
// containerd's database for ever.
func lockRoot(root string) (*os.File, error) {
	if err := os.MkdirAll(root, 0o700); err != nil {
		return nil, fmt.Errorf("create containerd's root: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(root, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open containerd's lock: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == nil {
		return f, nil
	}
	f.Close()
	if errors.Is(err, unix.EWOULDBLOCK) {
		e := cube.Errorf(cube.CodeFailedPrecondition, "%s is in use by another daemon", root)
		return nil, e.WithHint("stop the other cubelet, or give this one another root directory")
	}
	return nil, fmt.Errorf("lock %s: %w", root, err)
}

// resetStateOfEarlierBoot empties the state directory when the host has booted since
// it was written: its tasks are gone, and their process IDs belong to others. The
// boot's ID is written before anything else comes into the directory.
func resetStateOfEarlierBoot(state string) error {
	current, err := os.ReadFile(bootIDSource)
	if err != nil {
		return fmt.Errorf("read boot ID: %w", err)
	}
	file := filepath.Join(state, bootIDFile)
	saved, err := os.ReadFile(file)
	switch {
	case err == nil && string(saved) == string(current):
		return nil
	case err == nil:
		if err := removeContent(state); err != nil {
			return fmt.Errorf("empty the state of an earlier boot: %w", err)
		}
	case !errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("read saved boot ID: %w", err)
	}
	if err := os.MkdirAll(state, 0o711); err != nil {
		return fmt.Errorf("create containerd's state: %w", err)
	}
	temp := file + ".new"
	if err := os.WriteFile(temp, current, 0o600); err != nil {
		return fmt.Errorf("save boot ID: %w", err)
	}
	if err := os.Rename(temp, file); err != nil {
		return fmt.Errorf("save boot ID: %w", err)
	}
	return nil
}

// removeContent removes the boot ID last, so that a crash in between repeats it.
func removeContent(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Name() == bootIDFile {
			continue
		}
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return os.Remove(filepath.Join(dir, bootIDFile))
}

// readExits collects what shims wrote about tasks that ended and were not deleted.
// A file that cannot be read tells nothing, so it is passed over.
func readExits(state string) []vmm.Exit {
	files, err := filepath.Glob(filepath.Join(globEscape(state), "io.containerd.runtime.v2.task", "*", "*", "exit.json"))
	if err != nil {
		return nil
	}
	var exits []vmm.Exit
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		exit, err := decodeExit(data)
		if err != nil {
			continue
		}
		exit.Owner = filepath.Base(filepath.Dir(file))
		exits = append(exits, exit)
	}
	return exits
}

func decodeExit(data []byte) (vmm.Exit, error) {
	var e struct {
		Timestamp time.Time
		PID       int `json:"Pid"`
		Status    int
	}
	if err := json.Unmarshal(data, &e); err != nil {
		return vmm.Exit{}, fmt.Errorf("decode exit status: %w", err)
	}
	if e.PID <= 0 || e.Timestamp.IsZero() || e.Status < 0 {
		return vmm.Exit{}, errors.New("decode exit status: incomplete")
	}
	return vmm.Exit{Code: e.Status, Time: e.Timestamp}, nil
}

func globEscape(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}
