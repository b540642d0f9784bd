// Package durable holds the only file operations of which the result survives a
// power failure once they returned: every write is synced, and so is the directory
// that names it.
//
// The package-level functions are those of the zero FS.
package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Kind names one primitive operation.
type Kind string

// The primitive operations that everything in this package consists of.
const (
	OpCreate    Kind = "create" // a temporary file
	OpWrite     Kind = "write"
	OpSync      Kind = "sync" // a file
	OpSyncDir   Kind = "syncdir"
	OpMkdir     Kind = "mkdir"
	OpRename    Kind = "rename" // Path is the new name
	OpRemove    Kind = "remove"
	OpRemoveAll Kind = "removeall"
)

// Op is one primitive operation on a path.
type Op struct {
	Kind Kind
	Path string
}

// String renders the operation as one line of a trace.
func (o Op) String() string { return string(o.Kind) + " " + o.Path }

// FS performs durable operations. The zero value works on the host's files.
type FS struct {
	// Hook is called before each primitive operation, which fails with the hook's error
	// when there is one. Tests record traces with it and break single steps.
	Hook func(Op) error
}

func (f FS) step(kind Kind, path string, do func() error) error {
	if f.Hook != nil {
		if err := f.Hook(Op{Kind: kind, Path: path}); err != nil {
			return fmt.Errorf("%s %s: %w", kind, path, err)
		}
	}
	return do()
}

// tempInfix marks the temporary files of WriteFile.
const tempInfix = ".tmp-"

// IsTemp reports whether a file of that name is a temporary file that a WriteFile left
// behind when its process died. Such a file may be removed.
func IsTemp(name string) bool {
	base := filepath.Base(name)
	return strings.HasPrefix(base, ".") && strings.Contains(base, tempInfix)
}

// WriteFile replaces path by a file with that content and those permissions: readers
// and later boots see the old file or the new one, never a mixture. When only the last
// step fails, the sync of the directory, the error is returned although the new file is
// in place.
func (f FS) WriteFile(path string, data []byte, perm os.FileMode) error {
	dir := filepath.Dir(path)
	temp, err := f.writeTemp(path, data, perm)
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	err = f.step(OpRename, path, func() error { return os.Rename(temp, path) })
	if err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", path, err), os.Remove(temp))
	}
	return f.SyncDir(dir)
}

// writeTemp makes a synced temporary file beside path. After an error none is left.
func (f FS) writeTemp(path string, data []byte, perm os.FileMode) (temp string, err error) {
	var file *os.File
	err = f.step(OpCreate, path, func() error {
		file, err = os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+tempInfix+"*")
		return err
	})
	if err != nil {
		return "", err
	}
	err = f.step(OpWrite, path, func() error {
		_, err := file.Write(data)
		return err
	})
	if err == nil {
		err = file.Chmod(perm)
	}
	if err == nil {
		err = f.step(OpSync, path, file.Sync)
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return "", errors.Join(err, os.Remove(file.Name()))
	}
	return file.Name(), nil
}

// SyncFile flushes a file's data and metadata to its device. The file may be open
// elsewhere; what other processes wrote to it before the call is flushed too.
func (f FS) SyncFile(path string) error { return f.sync(OpSync, path, 0) }

// SyncDir flushes a directory: the names in it survive a power failure.
func (f FS) SyncDir(dir string) error { return f.sync(OpSyncDir, dir, unix.O_DIRECTORY) }

func (f FS) sync(kind Kind, path string, flags int) error {
	return f.step(kind, path, func() error {
		file, err := os.OpenFile(path, os.O_RDONLY|flags, 0)
		if err != nil {
			return fmt.Errorf("sync: %w", err)
		}
		return errors.Join(file.Sync(), file.Close())
	})
}

// MkdirAll makes the directory and its missing parents with the permissions, and syncs
// the parent of each one that it made. An existing directory keeps its permissions.
func (f FS) MkdirAll(dir string, perm os.FileMode) error {
	info, err := os.Stat(dir)
	switch {
	case err == nil && info.IsDir():
		return nil
	case err == nil:
		return &fs.PathError{Op: "mkdir", Path: dir, Err: unix.ENOTDIR}
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	parent := filepath.Dir(dir)
	if err := f.MkdirAll(parent, perm); err != nil {
		return err
	}
	err = f.Mkdir(dir, perm)
	if errors.Is(err, fs.ErrExist) {
		// A concurrent caller made it; its sync may not be done yet.
		return f.SyncDir(parent)
	}
	return err
}

// Mkdir makes one directory and syncs its parent. The error is fs.ErrExist when the
// name is taken. The permissions are not narrowed by the umask.
func (f FS) Mkdir(dir string, perm os.FileMode) error {
	err := f.step(OpMkdir, dir, func() error { return os.Mkdir(dir, perm) })
	if err != nil {
		return err
	}
	if err := os.Chmod(dir, perm); err != nil {
		return err
	}
	return f.SyncDir(filepath.Dir(dir))
}

// Rename moves a file or directory and syncs both parents, the new one first: after a
// power failure the object has at least one of its names. The content is not synced.
func (f FS) Rename(from, to string) error {
	err := f.step(OpRename, to, func() error { return os.Rename(from, to) })
	if err != nil {
		return err
	}
	newParent, oldParent := filepath.Dir(to), filepath.Dir(from)
	if err := f.SyncDir(newParent); err != nil || newParent == oldParent {
		return err
	}
	return f.SyncDir(oldParent)
}

// Remove deletes one file or empty directory and syncs its parent. A name that does not
// exist is no error.
func (f FS) Remove(path string) error {
	err := f.step(OpRemove, path, func() error { return os.Remove(path) })
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return f.SyncDir(filepath.Dir(path))
}

// RemoveAll deletes a tree and syncs its parent. It follows no symbolic link, but it
// does enter mount points: for trees that may hold any use storage.Pool.Remove.
func (f FS) RemoveAll(path string) error {
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	err := f.step(OpRemoveAll, path, func() error { return os.RemoveAll(path) })
	if err != nil {
		return err
	}
	return f.SyncDir(filepath.Dir(path))
}

// WriteFile is FS.WriteFile on the host's files.
func WriteFile(path string, data []byte, perm os.FileMode) error {
	return FS{}.WriteFile(path, data, perm)
}

// SyncFile is FS.SyncFile on the host's files.
func SyncFile(path string) error { return FS{}.SyncFile(path) }

// SyncDir is FS.SyncDir on the host's files.
func SyncDir(dir string) error { return FS{}.SyncDir(dir) }

// MkdirAll is FS.MkdirAll on the host's files.
func MkdirAll(dir string, perm os.FileMode) error { return FS{}.MkdirAll(dir, perm) }

// Mkdir is FS.Mkdir on the host's files.
func Mkdir(dir string, perm os.FileMode) error { return FS{}.Mkdir(dir, perm) }

// Rename is FS.Rename on the host's files.
func Rename(from, to string) error { return FS{}.Rename(from, to) }

// Remove is FS.Remove on the host's files.
func Remove(path string) error { return FS{}.Remove(path) }

// RemoveAll is FS.RemoveAll on the host's files.
func RemoveAll(path string) error { return FS{}.RemoveAll(path) }
