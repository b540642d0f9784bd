package hostmount

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cubelet/internal/durable"
)

const (
	pinName  = "ns"
	idName   = "id"
	lockName = "lock"
)

// openPin opens the pinned namespace. Whatever else lies under its name is an error:
// nothing, the plain file that a reboot leaves, another kind of namespace.
func (e *entry) openPin() (*os.File, error) {
	var ns *os.File // not looked at when the step is left behind
	err := e.step("open", func() error {
		f, err := os.OpenFile(filepath.Join(e.cfg.Dir, pinName), os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
		ns = f
		return err
	})
	if err != nil {
		return nil, err
	}
	kind, err := unix.IoctlRetInt(int(ns.Fd()), unix.NS_GET_NSTYPE)
	if err == nil && kind != unix.CLONE_NEWNS {
		err = fmt.Errorf("namespace of kind %#x", kind)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s is no mount namespace: %w", ns.Name(), err), ns.Close())
	}
	return ns, nil
}

// pin mounts the namespace of the thread tid, which is not the caller's, and records its
// identity. A stale pin is replaced.
func (e *entry) pin(tid int) error {
	path := filepath.Join(e.cfg.Dir, pinName)
	if err := unmountAll(path); err != nil {
		return err
	}
	// A plain file that is there will do: it may be a mount point below DIR's own mount,
	// which cannot be removed.
	if info, err := os.Lstat(path); err != nil || !info.Mode().IsRegular() {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			return err
		}
	}
	source := fmt.Sprintf("/proc/self/task/%d/ns/mnt", tid)
	id, err := namespaceOf(source)
	if err != nil {
		return err
	}
	if err := unix.Mount(source, path, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("pin mount namespace: %w", err)
	}
	return durable.WriteFile(filepath.Join(e.cfg.Dir, idName), []byte(id+"\n"), 0o600)
}

// unmountAll takes away everything that is mounted at path, which need not exist.
func unmountAll(path string) error {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		switch {
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
			return nil
		case err != nil:
			return &fs.PathError{Op: "unmount", Path: path, Err: err}
		}
	}
}

func isMountRoot(dir string) (bool, error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, dir, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_BASIC_STATS, &st); err != nil {
		return false, &fs.PathError{Op: "statx", Path: dir, Err: err}
	}
	return st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
}

// ownNamespace identifies the mount namespace of this process.
func ownNamespace() (string, error) { return namespaceOf("/proc/self/ns/mnt") }

// namespaceOf identifies a namespace for as long as the host is up: its inode number may
// be another one's after a reboot.
func namespaceOf(path string) (string, error) {
	link, err := os.Readlink(path)
	if err != nil {
		return "", err
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%.36s %s", boot, link), nil
}
