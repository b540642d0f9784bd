package hostmount

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// entry is one call of Enter. The namespace of a process can only be changed by a thread
// that shares its file system state with no other, so a thread of its own goes there and
// then replaces the whole program from inside.
type entry struct {
	cfg  Config
	self program
	lock *os.File
}

// program is what execve needs to start this program anew.
type program struct {
	path string
	info os.FileInfo // of the running binary
	cwd  string
}

func thisProgram() (p program, err error) {
	if p.path, err = os.Executable(); err != nil {
		return p, err
	}
	if p.info, err = os.Stat("/proc/self/exe"); err != nil {
		return p, err
	}
	p.cwd, err = os.Getwd()
	return p, err
}

var errHangs = errors.New("does not end")

// step runs one step under the deadline. A step that hangs is left behind.
func (e *entry) step(name string, do func() error) error {
	done := make(chan error, 1)
	go func() {
		err := e.before(name)
		if err == nil {
			err = do()
		}
		done <- err
	}()
	timer := time.NewTimer(e.cfg.deadline)
	defer timer.Stop()
	select {
	case err := <-done:
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	case <-timer.C:
		return fmt.Errorf("%s: %w", name, errHangs)
	}
}

func (e *entry) before(name string) error {
	if e.cfg.hook == nil {
		return nil
	}
	return e.cfg.hook(name)
}

// move runs change on a thread of its own, which changes that thread's mount namespace,
// and starts the program anew there. It returns only with an error: then the thread is
// gone, or, when it hangs, it never starts the program any more.
func (e *entry) move(name string, change func() error) error {
	// Whoever sets it first decides: the thread that it goes on, the deadline that it stops.
	var decided atomic.Bool
	failed := make(chan error, 1) // a thread that is left behind still ends
	go func() {
		// Never unlocked: the thread is of no use for anything else.
		runtime.LockOSThread()
		err := e.before(name)
		if err == nil {
			err = unix.Unshare(unix.CLONE_FS)
		}
		if err == nil {
			err = change()
		}
		if err == nil && decided.CompareAndSwap(false, true) {
			err = e.exec()
		}
		failed <- err
	}()
	timer := time.NewTimer(e.cfg.deadline)
	defer timer.Stop()
	var err error
	select {
	case err = <-failed:
	case <-timer.C:
		if decided.CompareAndSwap(false, true) {
			return fmt.Errorf("%s: %w", name, errHangs)
		}
		err = <-failed
	}
	return fmt.Errorf("%s: %w", name, err)
}

// create is the change that makes a new namespace and pins it. The pin is made by another
// thread, since it belongs to the host's namespace.
//
// A namespace can only be pinned in one with a lower number, so that no circle comes
// about, but Linux 6.18 numbers them from one range per CPU: a new one may get the lower
// number. On the CPU where the host's namespace got its number a new one's is higher, so
// each CPU is tried. The thread's CPUs are the program's afterwards: they are set back.
func (e *entry) create() (err error) {
	host, err := os.Open("/proc/thread-self/ns/mnt")
	if err != nil {
		return err
	}
	defer host.Close() // read only
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		return fmt.Errorf("CPUs of the thread: %w", err)
	}
	defer func() { err = errors.Join(err, unix.SchedSetaffinity(0, &allowed)) }()
	err = e.createHere()
	for cpu := 0; cpu < len(allowed)*64 && errors.Is(err, unix.EINVAL); cpu++ {
		if !allowed.IsSet(cpu) {
			continue
		}
		if err := unix.Setns(int(host.Fd()), unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("back to the host's namespace: %w", err)
		}
		var one unix.CPUSet
		one.Set(cpu)
		if err := unix.SchedSetaffinity(0, &one); err != nil {
			return fmt.Errorf("move to CPU %d: %w", cpu, err)
		}
		err = e.createHere()
	}
	return err
}

func (e *entry) createHere() error {
	if err := unshareMounts(); err != nil {
		return err
	}
	tid := unix.Gettid()
	return e.step("pin", func() error { return e.pin(tid) })
}

// unshareMounts gives the thread a namespace that receives the host's later mounts, where
// those are shared, and gives none back.
func unshareMounts() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("make mounts slaves: %w", err)
	}
	return nil
}

// exec replaces the program by itself, in the namespace of this thread.
func (e *entry) exec() error {
	if err := unix.Chdir(e.self.cwd); err != nil {
		e.cfg.Log.Warn("working directory is not in the mount namespace, using /", "dir", e.self.cwd, "err", err)
		if err := unix.Chdir("/"); err != nil {
			return fmt.Errorf("working directory: %w", err)
		}
	}
	id, err := namespaceOf("/proc/thread-self/ns/mnt")
	if err != nil {
		return err
	}
	path := e.self.path
	if info, err := os.Stat(path); err != nil || !os.SameFile(info, e.self.info) {
		path = "/proc/self/exe" // the binary was replaced or is not visible here
	}
	env := slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, markerEnv+"=") })
	env = append(env, markerEnv+"="+strconv.Itoa(os.Getpid())+":"+id)
	return fmt.Errorf("start %s anew: %w", path, syscall.Exec(path, os.Args, env))
}
