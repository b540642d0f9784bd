package boot

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

type mountSpec struct {
	source, target, fstype string
	flags                  uintptr
	data                   string
	optional               bool
}

const noExec = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

// earlyMounts are needed to find the disks; they move along into the image's root.
func earlyMounts() []mountSpec {
	return []mountSpec{
		{source: "devtmpfs", target: "dev", fstype: "devtmpfs", flags: unix.MS_NOSUID, data: "mode=755"},
		{source: "proc", target: "proc", fstype: "proc", flags: noExec},
		{source: "sysfs", target: "sys", fstype: "sysfs", flags: noExec},
	}
}

func lateMounts() []mountSpec {
	return []mountSpec{
		{source: "devpts", target: "dev/pts", fstype: "devpts", flags: unix.MS_NOSUID | unix.MS_NOEXEC, data: "gid=5,mode=620,ptmxmode=666"},
		{source: "shm", target: "dev/shm", fstype: "tmpfs", flags: unix.MS_NOSUID | unix.MS_NODEV, data: "mode=1777"},
		{source: "mqueue", target: "dev/mqueue", fstype: "mqueue", flags: noExec, optional: true},
		{source: "cgroup2", target: "sys/fs/cgroup", fstype: "cgroup2", flags: noExec, optional: true},
		{source: "tmpfs", target: "run", fstype: "tmpfs", flags: unix.MS_NOSUID | unix.MS_NODEV, data: "mode=755"},
	}
}

// mountAll mounts the list below root.
func mountAll(root string, list []mountSpec) error {
	for _, m := range list {
		target := filepath.Join(root, m.target)
		err := ensureDir(target)
		if err == nil {
			err = unix.Mount(m.source, target, m.fstype, m.flags, m.data)
		}
		if err != nil && !m.optional && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mount %s on %s: %w", m.fstype, target, err)
		}
	}
	return nil
}

// ensureTmp makes /tmp a directory that everybody may write to, whatever the image has.
// It is on the disk: what programs leave there must not take the guest's memory.
func ensureTmp() error {
	if err := ensureDir("/tmp"); err != nil {
		return err
	}
	return os.Chmod("/tmp", 0o777|os.ModeSticky)
}

// ensureDir makes path a directory. An image may have a link or a file in its place,
// which a mount would follow or refuse.
func ensureDir(path string) error {
	st, err := os.Lstat(path)
	if err == nil && st.IsDir() {
		return nil
	}
	if err == nil {
		if err := os.Remove(path); err != nil {
			return err
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.Mkdir(path, 0o755)
}

// Where the parts of the root file system are mounted in the initramfs.
const (
	lowerDir = "/lower"
	layerDir = "/layer"
	newRoot  = "/newroot"
)

// switchRoot joins the disks of opts with overlayfs, makes the result the root directory
// and frees the memory of the initramfs. It returns a descriptor of the writable layer's
// file system, whose own mount is no longer visible.
func switchRoot(opts Options) (layer int, err error) {
	if err := mountDisks(opts); err != nil {
		return -1, err
	}
	layer, err = unix.Open(layerDir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, &os.PathError{Op: "open", Path: layerDir, Err: err}
	}
	old, err := os.Open("/")
	if err != nil {
		return -1, err
	}
	defer old.Close()
	for _, m := range earlyMounts() {
		target := filepath.Join(newRoot, m.target)
		if err := ensureDir(target); err != nil {
			return -1, err
		}
		if err := unix.Mount("/"+m.target, target, "", unix.MS_MOVE, ""); err != nil {
			return -1, fmt.Errorf("move /%s: %w", m.target, err)
		}
	}
	// The overlay holds its own references to both.
	for _, dir := range [...]string{lowerDir, layerDir} {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			return -1, fmt.Errorf("unmount %s: %w", dir, err)
		}
	}
	if err := unix.Chdir(newRoot); err != nil {
		return -1, err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return -1, fmt.Errorf("move the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return -1, err
	}
	if err := unix.Chdir("/"); err != nil {
		return -1, err
	}
	return layer, emptyRoot(old)
}

func mountDisks(opts Options) error {
	if opts.Root == "" || opts.Layer == "" {
		return errors.New("the kernel command line names no cube.root and cube.layer")
	}
	for _, dir := range [...]string{lowerDir, layerDir, newRoot} {
		if err := ensureDir(dir); err != nil {
			return err
		}
	}
	for _, dev := range [...]string{opts.Root, opts.Layer} {
		if err := waitFor(dev, 10*time.Second); err != nil {
			return err
		}
	}
	if err := unix.Mount(opts.Root, lowerDir, "erofs", unix.MS_RDONLY|unix.MS_NODEV, ""); err != nil {
		return fmt.Errorf("mount root %s: %w", opts.Root, err)
	}
	if err := unix.Mount(opts.Layer, layerDir, "ext4", unix.MS_NOATIME, ""); err != nil {
		return fmt.Errorf("mount layer %s: %w", opts.Layer, err)
	}
	upper, work := layerDir+"/upper", layerDir+"/work"
	for _, dir := range [...]string{upper, work} {
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	data := "lowerdir=" + lowerDir + ",upperdir=" + upper + ",workdir=" + work
	if err := unix.Mount("overlay", newRoot, "overlay", 0, data); err != nil {
		return fmt.Errorf("mount overlay: %w", err)
	}
	return nil
}

// waitFor waits until the device node exists: drivers probe in the background.
func waitFor(dev string, limit time.Duration) error {
	for end := time.Now().Add(limit); ; time.Sleep(time.Millisecond) {
		_, err := os.Stat(dev)
		if err == nil {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("disk %s did not appear within %v", dev, limit)
		}
	}
}

// emptyRoot deletes the files of the initramfs, whose root directory old is. Nothing of
// another file system is touched.
func emptyRoot(old *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(old.Fd()), &st); err != nil {
		return err
	}
	return emptyDir(old, st.Dev)
}

func emptyDir(dir *os.File, dev uint64) error {
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		errs = append(errs, removeAt(dir, name, dev))
	}
	return errors.Join(errs...)
}

func removeAt(dir *os.File, name string, dev uint64) error {
	var st unix.Stat_t
	fd := int(dir.Fd())
	if err := unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil || st.Dev != dev {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return unix.Unlinkat(fd, name, 0)
	}
	sub, err := unix.Openat(fd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(sub), name)
	defer f.Close()
	if err := emptyDir(f, dev); err != nil {
		return err
	}
	// The mount point of the new root is busy; it is an empty directory.
	if err := unix.Unlinkat(fd, name, unix.AT_REMOVEDIR); err != nil && !errors.Is(err, syscall.EBUSY) {
		return err
	}
	return nil
}
