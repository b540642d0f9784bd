package storage

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

	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/durable"
)

const (
	loopMajor        = 7
	loopControlMajor = 10
	loopControlMinor = 237
	attachTries      = 64
)

// attachAndMount mounts the image at dir. An image that a loop device holds already is
// mounted from that device: two devices on one file would destroy its file system, while
// one device mounted twice is one file system.
func attachAndMount(ctx context.Context, image, dir string, log *slog.Logger) (err error) {
	nodes := &deviceNodes{dev: "/dev", near: filepath.Dir(image)}
	defer func() { err = errors.Join(err, nodes.close()) }()
	// Two daemons must not attach it at once. The lock is on a file of its own: the loop
	// device keeps the other one open, and a lock with it.
	lock, err := os.Open(image)
	if err != nil {
		return err
	}
	defer lock.Close() // gives the lock back
	if err := durable.Flock(ctx, lock, lockWait); err != nil {
		return err
	}
	backing, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer backing.Close() // the loop device holds its own reference
	loop, path, err := heldBy(backing, nodes)
	if err != nil {
		return err
	}
	if loop != nil {
		log.Info("pool image is already attached", "device", path)
	} else if loop, path, err = attach(backing, nodes); err != nil {
		return err
	}
	// The device clears itself when neither a mount nor this file holds it.
	defer loop.Close()
	return mountXFS(path, dir, image)
}

func mountXFS(device, dir, image string) error {
	err := unix.Mount(device, dir, "xfs", unix.MS_NOATIME|unix.MS_NODEV|unix.MS_NOSUID, "")
	switch {
	case errors.Is(err, unix.EUCLEAN), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EIO), errors.Is(err, unix.EBADMSG):
		return damagedImage(image, fmt.Errorf("mount: %w", err))
	case errors.Is(err, unix.ENODEV):
		return cube.Errorf(cube.CodeFailedPrecondition, "this kernel has no XFS").WithHint("Load the kernel module xfs.")
	case err != nil:
		return fmt.Errorf("mount %s: %w", device, err)
	}
	return nil
}

// attach takes a free loop device for the file.
func attach(backing *os.File, nodes *deviceNodes) (loop *os.File, path string, err error) {
	control, err := nodes.openControl()
	if err != nil {
		return nil, "", err
	}
	defer control.Close()
	for range attachTries {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, "", fmt.Errorf("get a free loop device: %w", err)
		}
		loop, path, err = nodes.open(n, os.O_RDWR)
		if err != nil {
			return nil, "", err
		}
		err = configure(loop, backing)
		if err == nil {
			return loop, path, nil
		}
		if err = errors.Join(err, loop.Close()); !errors.Is(err, unix.EBUSY) {
			return nil, "", fmt.Errorf("attach %s to %s: %w", backing.Name(), path, err)
		}
	}
	return nil, "", cube.Errorf(cube.CodeUnavailable, "every free loop device was taken by others")
}

func configure(loop, backing *os.File) error {
	cfg := unix.LoopConfig{Fd: uint32(backing.Fd())}
	cfg.Info.Flags = unix.LO_FLAGS_AUTOCLEAR
	copy(cfg.Info.File_name[:len(cfg.Info.File_name)-1], backing.Name())
	if err := unix.IoctlLoopConfigure(int(loop.Fd()), &cfg); err != nil {
		return err
	}
	// Direct I/O keeps the pool's pages out of the host's page cache a second time. Not
	// every file system can; the device works without.
	_ = unix.IoctlSetInt(int(loop.Fd()), unix.LOOP_SET_DIRECT_IO, 1)
	return nil
}

// heldBy returns the loop device that holds the whole file, nil when there is none.
func heldBy(backing *os.File, nodes *deviceNodes) (loop *os.File, path string, err error) {
	var want unix.Stat_t
	if err := unix.Fstat(int(backing.Fd()), &want); err != nil {
		return nil, "", err
	}
	attached, err := filepath.Glob("/sys/block/loop*/loop")
	if err != nil {
		return nil, "", err
	}
	for _, sys := range attached {
		n, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(filepath.Dir(sys)), "loop"))
		if err != nil {
			continue
		}
		loop, path, err := nodes.open(n, os.O_RDONLY)
		if errors.Is(err, unix.ENXIO) {
			continue // gone meanwhile
		}
		if err != nil {
			return nil, "", err
		}
		info, err := unix.IoctlLoopGetStatus64(int(loop.Fd()))
		if err != nil || info.Device != want.Dev || info.Inode != want.Ino {
			_ = loop.Close() // of somebody else
			continue
		}
		if info.Offset != 0 || info.Sizelimit != 0 || info.Flags&unix.LO_FLAGS_READ_ONLY != 0 {
			_ = loop.Close()
			return nil, "", cube.Errorf(cube.CodeFailedPrecondition, "%s is attached to %s in part or read-only", backing.Name(), path)
		}
		return loop, path, nil
	}
	return nil, "", nil
}

// mountedFrom reports whether the file system at dir is on a loop device of the image.
func mountedFrom(dir, image string) (bool, error) {
	var at, want unix.Stat_t
	if err := unix.Stat(dir, &at); err != nil {
		return false, &fs.PathError{Op: "stat", Path: dir, Err: err}
	}
	err := unix.Stat(image, &want)
	if errors.Is(err, fs.ErrNotExist) || unix.Major(at.Dev) != loopMajor {
		return false, nil
	}
	if err != nil {
		return false, &fs.PathError{Op: "stat", Path: image, Err: err}
	}
	nodes := &deviceNodes{dev: "/dev", near: filepath.Dir(image)}
	loop, _, err := nodes.open(int(unix.Minor(at.Dev)), os.O_RDONLY)
	if err != nil {
		return false, errors.Join(err, nodes.close())
	}
	info, err := unix.IoctlLoopGetStatus64(int(loop.Fd()))
	if errors.Is(err, unix.EOVERFLOW) || errors.Is(err, unix.ENXIO) {
		info, err = &unix.LoopInfo64{}, nil
	}
	if err = errors.Join(err, loop.Close(), nodes.close()); err != nil {
		return false, err
	}
	return info.Device == want.Dev && info.Inode == want.Ino, nil
}

// deviceNodes opens loop devices, and makes nodes of its own for those that /dev lacks,
// as it does in containers and on hosts without udev. Close removes them again.
type deviceNodes struct {
	dev  string // directory of the host's nodes, /dev
	near string // directory for the private nodes' directory
	dir  string // private directory, empty until it is needed
}

func (d *deviceNodes) open(n, flag int) (*os.File, string, error) {
	if n < 0 {
		return nil, "", fmt.Errorf("loop device %d", n)
	}
	path, dev := filepath.Join(d.dev, "loop"+strconv.Itoa(n)), unix.Mkdev(loopMajor, uint32(n))
	return d.openNode(node{path: path, kind: unix.S_IFBLK, dev: dev}, flag)
}

func (d *deviceNodes) openControl() (*os.File, error) {
	f, _, err := d.openNode(node{path: filepath.Join(d.dev, "loop-control"), kind: unix.S_IFCHR, dev: unix.Mkdev(loopControlMajor, loopControlMinor)}, os.O_RDWR)
	if err != nil {
		return nil, cube.Errorf(cube.CodeFailedPrecondition, "no loop devices: %w", err).
			WithHint("Load the kernel module loop, or allow the devices when this is a container.")
	}
	return f, nil
}

// node is a device and where it usually is.
type node struct {
	path string
	kind uint32 // S_IFBLK or S_IFCHR
	dev  uint64
}

// openNode opens the node when it is that device, else a private one of it.
func (d *deviceNodes) openNode(n node, flag int) (*os.File, string, error) {
	var st unix.Stat_t
	path := n.path
	err := unix.Lstat(path, &st)
	if err != nil || st.Mode&unix.S_IFMT != n.kind || st.Rdev != n.dev {
		if path, err = d.make(n); err != nil {
			return nil, "", err
		}
	}
	f, err := os.OpenFile(path, flag, 0)
	return f, path, err
}

func (d *deviceNodes) make(n node) (string, error) {
	if d.dir == "" {
		dir, err := os.MkdirTemp(d.near, ".nodes-")
		if err != nil {
			return "", err
		}
		d.dir = dir
	}
	path := filepath.Join(d.dir, filepath.Base(n.path))
	if err := unix.Mknod(path, n.kind|0o600, int(n.dev)); err != nil && !errors.Is(err, unix.EEXIST) {
		return "", &fs.PathError{Op: "mknod", Path: path, Err: err}
	}
	return path, nil
}

func (d *deviceNodes) close() error {
	if d.dir == "" {
		return nil
	}
	return os.RemoveAll(d.dir)
}

// isMountRoot reports whether something is mounted at dir.
func isMountRoot(dir string) (bool, error) {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, dir, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_BASIC_STATS, &st)
	if err != nil {
		return false, &fs.PathError{Op: "statx", Path: dir, Err: err}
	}
	return st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0, nil
}
