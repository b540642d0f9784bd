package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/durable"
)

// Link makes dst another name of the file src: it stays when src is removed. Both are in
// the pool; neither is synced. Codes: NotFound (src), AlreadyExists (dst), Invalid (a path
// outside the pool).
func (p *Pool) Link(ctx context.Context, src, dst string) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("link %s: %w", dst, err)
	}
	from, err := p.beneath(filepath.Dir(src), unix.O_DIRECTORY, 0)
	if err != nil {
		return linkError(src, dst, err)
	}
	defer from.Close() // only a place
	to, err := p.beneath(filepath.Dir(dst), unix.O_DIRECTORY, 0)
	if err != nil {
		return linkError(src, dst, err)
	}
	defer to.Close() // only a place
	err = unix.Linkat(int(from.Fd()), filepath.Base(src), int(to.Fd()), filepath.Base(dst), 0)
	return linkError(src, dst, err)
}

func linkError(src, dst string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return cube.Errorf(cube.CodeNotFound, "link %s to %s: %w", src, dst, err)
	case errors.Is(err, fs.ErrExist):
		return cube.Errorf(cube.CodeAlreadyExists, "link %s to %s: %w", src, dst, err)
	}
	return fmt.Errorf("link %s to %s: %w", src, dst, err)
}

// Flush writes a file's data to the disk, so that a clone of it finds nothing to write.
func (p *Pool) Flush(ctx context.Context, path string) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("flush %s: %w", path, err)
	}
	f, err := p.beneath(path, unix.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("flush: %w", err)
	}
	if err := errors.Join(unix.Fdatasync(int(f.Fd())), f.Close()); err != nil {
		return fmt.Errorf("flush %s: %w", path, err)
	}
	return nil
}

// Sync makes files, their names, and the names of their directories durable.
func (p *Pool) Sync(ctx context.Context, paths ...string) error {
	synced := map[string]bool{}
	for _, path := range paths {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("sync %s: %w", path, err)
		}
		if err := p.fs.SyncFile(path); err != nil {
			return fmt.Errorf("sync: %w", err)
		}
	}
	for _, path := range paths {
		dir := filepath.Dir(path)
		for _, d := range []string{dir, filepath.Dir(dir)} {
			if synced[d] {
				continue
			}
			synced[d] = true
			if err := p.fs.SyncDir(d); err != nil {
				return fmt.Errorf("sync: %w", err)
			}
		}
	}
	return nil
}

// Drop removes files; those that are not there are no error.
func (p *Pool) Drop(ctx context.Context, paths ...string) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("drop files: %w", err)
	}
	var errs []error
	for _, path := range paths {
		if err := p.drop(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("drop %s: %w", path, err))
		}
	}
	return errors.Join(errs...)
}

func (p *Pool) drop(path string) error {
	dir, err := p.beneath(filepath.Dir(path), unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer dir.Close() // only a place
	return unix.Unlinkat(int(dir.Fd()), filepath.Base(path), 0)
}

// files is how the pool makes things durable; tests look at it and break it.
type files = durable.FS

// isFile reports whether there is a regular file.
func isFile(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode().IsRegular()
}
