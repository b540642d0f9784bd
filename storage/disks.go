package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
)

// Create makes the owner's directory (0700) and returns its path. It is not synced: what
// belongs to a sandbox is of no use after a power failure. Codes: Invalid (name),
// AlreadyExists, NoSpace.
func (p *Pool) Create(ctx context.Context, owner string) (dir string, err error) {
	if dir, err = p.SandboxDir(owner); err != nil {
		return "", err
	}
	if err := ctx.Err(); err != nil {
		return "", fmt.Errorf("create disks of %s: %w", owner, err)
	}
	err = os.Mkdir(dir, 0o700)
	if errors.Is(err, fs.ErrExist) {
		return "", &cube.Error{Code: cube.CodeAlreadyExists, Op: "create disks", ID: owner, Err: err}
	}
	if err != nil {
		return "", fmt.Errorf("create disks of %s: %w", owner, err)
	}
	return dir, nil
}

// Remove deletes the owner's directory and all below it; none is no error. It follows no
// symbolic link and enters no mount: when something is mounted below the directory,
// everything else is deleted and the error, FailedPrecondition, names the mount point.
func (p *Pool) Remove(ctx context.Context, owner string) error {
	if err := checkName(owner); err != nil {
		return err
	}
	if err := p.removeTree(ctx, sandboxesName, owner); err != nil {
		return fmt.Errorf("remove disks of %s: %w", owner, err)
	}
	return nil
}

// RemoveTemplate deletes a template's directory with the care of Remove.
func (p *Pool) RemoveTemplate(ctx context.Context, id string) error {
	if err := checkName(id); err != nil {
		return err
	}
	if err := p.removeTree(ctx, templatesName, id); err != nil {
		return fmt.Errorf("remove files of %s: %w", id, err)
	}
	return nil
}

// List returns the owners that have a directory, sorted.
func (p *Pool) List(ctx context.Context) ([]string, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("list disks: %w", err)
	}
	entries, err := os.ReadDir(p.SandboxesDir())
	if err != nil {
		return nil, fmt.Errorf("list disks: %w", err)
	}
	var owners []string
	for _, e := range entries {
		if e.IsDir() && checkName(e.Name()) == nil {
			owners = append(owners, e.Name())
		}
	}
	slices.Sort(owners)
	return owners, nil
}

// beneath opens a path in the pool without following a symbolic link or entering a mount
// on the way.
func (p *Pool) beneath(path string, flags uint64, mode uint64) (*os.File, error) {
	rel, err := filepath.Rel(p.dir, path)
	if err != nil || rel == "." || rel == ".." || strings.HasPrefix(rel, "../") {
		return nil, cube.Errorf(cube.CodeInvalid, "%s is not in the pool", path)
	}
	fd, err := openat2(int(p.root.Fd()), rel, flags, mode)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

func openat2(dir int, name string, flags, mode uint64) (int, error) {
	how := unix.OpenHow{
		Flags: flags | unix.O_CLOEXEC, Mode: mode,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV | unix.RESOLVE_NO_MAGICLINKS,
	}
	for {
		fd, err := unix.Openat2(dir, name, &how)
		// The kernel gives up on a look-up that raced with a rename anywhere.
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}
