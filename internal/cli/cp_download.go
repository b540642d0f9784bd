package cli

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/api/envd/filesystem"
)

// maxDepth bounds how deep a guest's directories are followed: the guest may lie.
const maxDepth = 1000

// download copies a path of the guest to a local path, or to standard output.
func (x *copier) download(ctx context.Context, src, dst string) error {
	entry, err := x.guest.stat(ctx, src)
	if err != nil {
		return err
	}
	if entry == nil {
		return cube.Errorf(cube.CodeNotFound, "%s:%s does not exist", x.sandbox, src)
	}
	isDir := entry.GetType() == filesystem.FileType_FILE_TYPE_DIRECTORY
	switch {
	case dst == "-" && isDir:
		return fmt.Errorf("%s is a directory; standard output takes a file", src)
	case !isDir && entry.GetType() != filesystem.FileType_FILE_TYPE_FILE:
		return fmt.Errorf("%s is neither a file nor a directory", src)
	case dst == "-":
		return x.receive(ctx, src, x.app.stdout)
	}
	base, err := guestBase(src, entry)
	if err != nil {
		return err
	}
	if base != "" {
		if st, err := os.Stat(dst); err == nil && st.IsDir() || strings.HasSuffix(dst, "/") {
			dst = filepath.Join(dst, base)
		}
	}
	parent := filepath.Dir(filepath.Clean(dst))
	name := filepath.Base(filepath.Clean(dst))
	if isDir {
		if err := os.MkdirAll(dst, dirMode); err != nil {
			return err
		}
		parent, name = dst, "."
	}
	// The guest chooses names and links: nothing may be written outside of the root.
	root, err := os.OpenRoot(parent)
	if err != nil {
		return err
	}
	defer root.Close()
	if isDir {
		if path.IsAbs(entry.GetPath()) {
			src = entry.GetPath()
		}
		return x.downloadTree(ctx, &tree{root: root, base: src})
	}
	x.total = entry.GetSize()
	return x.downloadFile(ctx, root, src, name, fs.FileMode(entry.GetMode()).Perm())
}

// guestBase is the name under which a source is copied into a directory.
func guestBase(src string, entry *filesystem.EntryInfo) (string, error) {
	if strings.HasSuffix(src, "/.") || path.Clean(src) == "/" {
		return "", nil
	}
	base := path.Base(path.Clean(src))
	if base == ".." || base == "." || base == "~" {
		base = path.Base(path.Clean(entry.GetPath()))
	}
	return base, checkName(base)
}

// checkName refuses a name that is not the name of one directory entry.
func checkName(name string) error {
	if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") {
		return fmt.Errorf("%q is no file name", name)
	}
	return nil
}

func (x *copier) receive(ctx context.Context, src string, w io.Writer) error {
	body, size, err := x.guest.read(ctx, src)
	if err != nil {
		return err
	}
	n, err := io.Copy(w, io.TeeReader(body, &counter{x, src}))
	err = errors.Join(err, body.Close())
	if err == nil && size >= 0 && n != size {
		err = fmt.Errorf("%s: %d of %d bytes arrived", src, n, size)
	}
	return err
}

// downloadFile writes a file beside its place and renames it when it is whole.
func (x *copier) downloadFile(ctx context.Context, root *os.Root, src, name string, mode fs.FileMode) error {
	if st, err := root.Lstat(name); err == nil && st.IsDir() {
		return fmt.Errorf("%s is a directory", name)
	}
	temp := path.Join(path.Dir(name), ".cubecli-"+rand.Text())
	f, err := root.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = x.receive(ctx, src, f)
	if err == nil {
		err = f.Chmod(mode)
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = root.Rename(temp, name)
	}
	if err != nil {
		_ = root.Remove(temp) // the first error matters
	}
	return err
}

// tree is a directory under way.
type tree struct {
	root  *os.Root
	base  string // the directory's path in the guest
	modes []dirEntryMode
}

type dirEntryMode struct {
	name string
	mode fs.FileMode
}

func (x *copier) downloadTree(ctx context.Context, t *tree) error {
	if err := x.downloadDir(ctx, t, ".", 0); err != nil {
		return err
	}
	// Last and innermost first: a directory that is read-only could not be filled.
	for i := len(t.modes) - 1; i >= 0; i-- {
		if err := t.root.Chmod(t.modes[i].name, t.modes[i].mode); err != nil {
			x.skip(t.modes[i].name, "its mode: %v", err)
		}
	}
	return nil
}

func (x *copier) downloadDir(ctx context.Context, t *tree, dir string, depth int) error {
	if depth > maxDepth {
		x.skip(dir, "it is nested too deeply")
		return nil
	}
	entries, err := x.guest.list(ctx, path.Join(t.base, dir))
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := checkName(e.GetName()); err != nil {
			x.skip(dir, "%v", err)
			continue
		}
		name := path.Join(dir, e.GetName())
		err := x.downloadEntry(ctx, t, name, e, depth)
		if err != nil && isCanceled(ctx, err) {
			return err
		}
		if err != nil {
			x.skip(name, "%s", explain(err).text)
		}
	}
	return nil
}

func (x *copier) downloadEntry(ctx context.Context, t *tree, name string, e *filesystem.EntryInfo, depth int) error {
	mode := fs.FileMode(e.GetMode()).Perm()
	switch {
	case e.SymlinkTarget != nil:
		return t.link(name, e.GetSymlinkTarget())
	case e.GetType() == filesystem.FileType_FILE_TYPE_DIRECTORY:
		if err := t.root.Mkdir(name, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		t.modes = append(t.modes, dirEntryMode{name, mode})
		return x.downloadDir(ctx, t, name, depth+1)
	case e.GetType() == filesystem.FileType_FILE_TYPE_FILE:
		return x.downloadFile(ctx, t.root, path.Join(t.base, name), name, mode)
	}
	return errors.New("it is neither a file, a directory nor a link")
}

// link makes a symbolic link. The guest tells where the link leads in the end; only what
// leads into the tree means the same here.
func (t *tree) link(name, target string) error {
	inside, ok := strings.CutPrefix(path.Clean(target), strings.TrimSuffix(path.Clean(t.base), "/")+"/")
	if !path.IsAbs(target) {
		inside, ok = path.Join(path.Dir(name), target), true
	}
	if !ok || !filepath.IsLocal(inside) {
		return fmt.Errorf("it is a link out of the directory, to %s", target)
	}
	rel, err := filepath.Rel(path.Dir(name), inside)
	if err != nil {
		return err
	}
	if st, err := t.root.Lstat(name); err == nil && st.Mode().Type() == fs.ModeSymlink {
		if err := t.root.Remove(name); err != nil {
			return err
		}
	}
	return t.root.Symlink(rel, name)
}
