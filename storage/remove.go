package storage

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
)

// maxDepth bounds how many directories a removal holds open. A directory further down is
// first moved up beside the tree's own entries.
const maxDepth = 64

// remover deletes one tree by file descriptors, so that no name is looked up twice.
type remover struct {
	top   int // descriptor of the tree's directory
	moved int // directories moved up so far
}

// removeTree deletes parent/name in the pool, which may not exist.
func (p *Pool) removeTree(ctx context.Context, parent, name string) error {
	dir, err := openat2(int(p.root.Fd()), parent, unix.O_DIRECTORY|unix.O_RDONLY, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: parent, Err: err}
	}
	defer func() { _ = unix.Close(dir) }() // read only
	return removeEntry(ctx, &remover{top: -1}, dir, name, 0)
}

// removeEntry deletes one entry of the directory dir and what is below it.
func removeEntry(ctx context.Context, r *remover, dir int, name string, depth int) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	err := unix.Unlinkat(dir, name, 0)
	switch {
	case err == nil, errors.Is(err, unix.ENOENT):
		return nil
	case errors.Is(err, unix.EBUSY):
		return mountInTheWay(name)
	case !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EPERM):
		return &os.PathError{Op: "unlink", Path: name, Err: err}
	}
	if depth > maxDepth {
		return r.moveUp(dir, name)
	}
	fd, err := openat2(dir, name, unix.O_DIRECTORY|unix.O_RDONLY|unix.O_NOFOLLOW, 0)
	if errors.Is(err, unix.EXDEV) {
		return mountInTheWay(name)
	}
	if errors.Is(err, unix.ENOTDIR) {
		return &os.PathError{Op: "unlink", Path: name, Err: unix.EPERM} // an immutable file
	}
	if err != nil {
		return &os.PathError{Op: "open", Path: name, Err: err}
	}
	if err := r.emptyDir(ctx, fd, depth); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	err = unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
	switch {
	case err == nil, errors.Is(err, unix.ENOENT):
		return nil
	case errors.Is(err, unix.EBUSY):
		return mountInTheWay(name)
	}
	return &os.PathError{Op: "rmdir", Path: name, Err: err}
}

// emptyDir deletes everything in the directory fd, which it closes.
func (r *remover) emptyDir(ctx context.Context, fd, depth int) error {
	file := os.NewFile(uintptr(fd), "dir")
	defer file.Close() // read only
	if r.top < 0 {
		r.top = fd
		defer func() { r.top = -1 }()
	}
	var errs []error
	for {
		// Deleting entries may make the kernel's position skip others: start over until
		// a pass from the beginning finds nothing.
		if _, err := file.Seek(0, io.SeekStart); err != nil {
			return err
		}
		names, err := file.Readdirnames(-1)
		if err != nil {
			return err
		}
		if len(names) == 0 {
			return nil
		}
		for _, name := range names {
			if err := removeEntry(ctx, r, fd, name, depth+1); err != nil {
				errs = append(errs, err)
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
		}
		if len(errs) > 0 {
			return errors.Join(errs...)
		}
	}
}

// moveUp moves a directory that lies too deep into the top of the tree, whose loop finds
// it there.
func (r *remover) moveUp(dir int, name string) error {
	for {
		r.moved++
		to := fmt.Sprintf(".deep-%d", r.moved)
		err := unix.Renameat2(dir, name, r.top, to, unix.RENAME_NOREPLACE)
		if errors.Is(err, unix.EEXIST) {
			continue
		}
		if errors.Is(err, unix.EBUSY) {
			return mountInTheWay(name)
		}
		if err != nil {
			return &os.PathError{Op: "rename", Path: name, Err: err}
		}
		return nil
	}
}

func mountInTheWay(name string) error {
	return cube.Errorf(cube.CodeFailedPrecondition, "%s is a mount point, which a removal never enters", name).
		WithHint("Unmount it and try again.")
}
