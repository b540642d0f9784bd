package storage

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
)

// copyChunk is how much is copied between two looks at the context.
const copyChunk = 8 << 20

// Clone makes the new file dst (0600) a copy of src. On a pool with reflinks both share
// their blocks until one is written, and it takes constant time after the source's
// unwritten pages, if any, went to disk; without reflinks, or from outside the pool, the
// data is copied and holes stay holes. Both paths are absolute, dst is in the pool.
//
// dst is not synced: a power failure may leave it empty or absent. That is right for a
// sandbox, which ends with its VMM; who makes something lasting syncs it.
//
// Codes: NotFound (src), AlreadyExists (dst), NoSpace, Invalid (a path, a source that is no
// regular file), Canceled, DeadlineExceeded. After an error there is no dst, unless it
// existed before.
func (p *Pool) Clone(ctx context.Context, src, dst string) error {
	if err := p.clone(ctx, src, dst); err != nil {
		return fmt.Errorf("clone %s to %s: %w", src, dst, err)
	}
	return nil
}

func (p *Pool) clone(ctx context.Context, src, dst string) (err error) {
	if err := ctx.Err(); err != nil {
		return err
	}
	from, err := openRegular(src)
	if err != nil {
		return err
	}
	defer from.Close() // read only
	to, err := p.beneath(dst, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return cube.Errorf(cube.CodeAlreadyExists, "%w", err)
	}
	if err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, to.Close())
		if err != nil {
			err = errors.Join(err, os.Remove(dst))
		}
	}()
	if p.reflink {
		err = fileClone(to, from)
		if !errors.Is(err, unix.EXDEV) {
			return err
		}
		p.log.Warn("clone from outside the pool is a copy", "source", src)
	}
	return sparseCopy(ctx, to, from)
}

func openRegular(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, cube.Errorf(cube.CodeNotFound, "%w", err)
	}
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = cube.Errorf(cube.CodeInvalid, "%s is not a regular file", path)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func fileClone(to, from *os.File) error {
	for {
		err := unix.IoctlFileClone(int(to.Fd()), int(from.Fd()))
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// sparseCopy copies the data of from and leaves its holes out.
func sparseCopy(ctx context.Context, to, from *os.File) error {
	info, err := from.Stat()
	if err != nil {
		return err
	}
	size := info.Size()
	if err := to.Truncate(size); err != nil {
		return err
	}
	for at := int64(0); at < size; {
		data, err := from.Seek(at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // only a hole is left
		}
		if err != nil {
			return err
		}
		end, err := from.Seek(data, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		if err := copyRange(ctx, to, from, data, end); err != nil {
			return err
		}
		at = end
	}
	return nil
}

func copyRange(ctx context.Context, to, from *os.File, at, end int64) error {
	if _, err := from.Seek(at, io.SeekStart); err != nil {
		return err
	}
	if _, err := to.Seek(at, io.SeekStart); err != nil {
		return err
	}
	for at < end {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := io.CopyN(to, from, min(copyChunk, end-at))
		if err != nil {
			return err
		}
		at += n
	}
	return nil
}

// canReflink tries to clone a file in dir.
func canReflink(dir string) (bool, error) {
	src, err := os.CreateTemp(dir, ".reflink-")
	if err != nil {
		return false, err
	}
	dst, err := os.CreateTemp(dir, ".reflink-")
	if err != nil {
		return false, errors.Join(err, src.Close(), os.Remove(src.Name()))
	}
	_, err = src.Write(make([]byte, os.Getpagesize()))
	can := false
	if err == nil {
		err = fileClone(dst, src)
		can = err == nil
		if noReflink(err) {
			err = nil
		}
	}
	return can, errors.Join(err, src.Close(), dst.Close(), os.Remove(src.Name()), os.Remove(dst.Name()))
}

// noReflink reports whether err is how a file system says that it cannot clone.
func noReflink(err error) bool {
	for _, e := range [...]error{unix.EOPNOTSUPP, unix.ENOTTY, unix.EINVAL, unix.ENOSYS, unix.EXDEV} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
