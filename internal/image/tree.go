package image

import (
	"strings"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/image/erofs"
)

// The tree of an image's files exists in memory only: names in archives are never paths
// of the host, so there is nothing on the host that they could reach.

// object is an inode and the number of its names.
type object struct {
	erofs.Inode
	names int
}

// node is one name in a directory.
type node struct {
	obj      *object
	layer    int // that placed it or, for a directory, described it last
	children map[string]*node
}

func (n *node) isDir() bool     { return n.obj.IsDir() }
func (n *node) isSymlink() bool { return n.obj.Mode&erofs.ModeType == erofs.ModeSymlink }

// tree is the merged view of the layers so far.
type tree struct {
	root *node
	// free is told of files that lost their last name.
	free func(erofs.Extent) error
}

const (
	maxPath  = 4096 // bytes, PATH_MAX
	maxDepth = maxPath / 2
	maxLinks = 255 // symbolic links followed in one path
)

func newTree(free func(erofs.Extent) error) *tree {
	return &tree{root: newDir(0, 0), free: free}
}

func newDir(layer int, mtime int64) *node {
	return &node{
		obj:      &object{Inode: erofs.Inode{Mode: erofs.ModeDir | 0o755, MTime: mtime}, names: 1},
		layer:    layer,
		children: map[string]*node{},
	}
}

// splitPath splits a name of an archive. An absolute name means the image's root; a name
// that leaves the root is refused.
func splitPath(name string) ([]string, error) {
	if len(name) > maxPath {
		return nil, invalid("a name of %d bytes, at most %d are possible: %.80q...", len(name), maxPath, name)
	}
	if strings.ContainsRune(name, 0) {
		return nil, invalid("name %q contains a zero byte", name)
	}
	var parts []string
	for part := range strings.SplitSeq(name, "/") {
		switch {
		case part == "" || part == ".":
		case part == "..":
			return nil, invalid("name %q has the element .. and may leave the image's root", name)
		case len(part) > erofs.MaxNameBytes:
			return nil, invalid("a name has %d bytes, at most %d are possible: %.80q...", len(part), erofs.MaxNameBytes, part)
		default:
			parts = append(parts, part)
		}
	}
	return parts, nil
}

// walk finds a directory as the kernel would inside a root directory: symbolic links are
// followed, and .. at the root stays there.
type walk struct {
	layer  int
	create bool // make missing directories
	mtime  time.Time
	stack  []*node // from the root to the current directory
	todo   []string
	links  int
}

// dir returns the directory of the path, nil when it is missing and not to be made.
func (t *tree) dir(parts []string, w walk) (*node, error) {
	w.stack = append(w.stack[:0], t.root)
	w.todo = parts
	for len(w.todo) > 0 {
		part := w.todo[0]
		w.todo = w.todo[1:]
		found, err := w.step(part)
		if err != nil || !found {
			return nil, err
		}
		if len(w.stack) > maxDepth {
			return nil, invalid("%s: directories are nested more than %d deep", strings.Join(parts, "/"), maxDepth)
		}
	}
	return w.stack[len(w.stack)-1], nil
}

func (w *walk) step(part string) (found bool, err error) {
	cur := w.stack[len(w.stack)-1]
	switch part {
	case "", ".":
		return true, nil
	case "..":
		w.stack = w.stack[:max(1, len(w.stack)-1)]
		return true, nil
	}
	next := cur.children[part]
	switch {
	case next == nil && !w.create:
		return false, nil
	case next == nil && len(part) > erofs.MaxNameBytes:
		return false, invalid("a symbolic link names a directory of %d bytes", len(part))
	case next == nil:
		next = newDir(w.layer, w.mtime.Unix())
		cur.children[part] = next
	case next.isSymlink():
		return true, w.follow(next.obj.Target)
	case !next.isDir():
		return false, invalid("%q is a file and cannot contain anything", part)
	}
	w.stack = append(w.stack, next)
	return true, nil
}

func (w *walk) follow(target string) error {
	if w.links++; w.links > maxLinks {
		return invalid("too many symbolic links in one path, the last one leads to %q", target)
	}
	if strings.HasPrefix(target, "/") {
		w.stack = w.stack[:1]
	}
	w.todo = append(strings.Split(target, "/"), w.todo...)
	return nil
}

// put gives the object a name. A directory that meets a directory keeps its children,
// anything else replaces what was there.
func (t *tree) put(parent *node, name string, obj *object, layer int) error {
	old := parent.children[name]
	switch {
	case old != nil && old.isDir() && obj.IsDir():
		old.obj, old.layer = obj, layer
		return nil
	case old != nil && old.obj == obj: // a hard link that exists already
		old.layer = layer
		return nil
	case old != nil:
		if err := t.drop(old); err != nil {
			return err
		}
	}
	n := &node{obj: obj, layer: layer}
	if obj.IsDir() {
		n.children = map[string]*node{}
	}
	obj.names++
	parent.children[name] = n
	return nil
}

// drop takes a name and everything below it away.
func (t *tree) drop(n *node) error {
	for _, child := range n.children {
		if err := t.drop(child); err != nil {
			return err
		}
	}
	if n.obj.names--; n.obj.names == 0 && n.obj.Mode&erofs.ModeType == erofs.ModeRegular {
		return t.free(n.obj.Data)
	}
	return nil
}

// hide takes away what lower layers placed at a name: a whiteout says nothing about its
// own layer.
func (t *tree) hide(parent *node, name string, layer int) error {
	n := parent.children[name]
	if n == nil {
		return nil
	}
	if err := t.hideChildren(n, layer); err != nil {
		return err
	}
	if n.layer == layer || len(n.children) > 0 {
		return nil
	}
	delete(parent.children, name)
	return t.drop(n)
}

func (t *tree) hideChildren(n *node, layer int) error {
	for name := range n.children {
		if err := t.hide(n, name, layer); err != nil {
			return err
		}
	}
	return nil
}

// inodes turns the tree into what the writer takes. The tree cannot be used afterwards.
func (n *node) inodes() *erofs.Inode {
	if n.isDir() {
		n.obj.Children = make(map[string]*erofs.Inode, len(n.children))
		for name, child := range n.children {
			n.obj.Children[name] = child.inodes()
		}
		n.children = nil
	}
	return &n.obj.Inode
}

func invalid(format string, args ...any) error {
	return cube.Errorf(cube.CodeInvalid, format, args...)
}
