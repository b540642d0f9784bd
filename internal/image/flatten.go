package image

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"strings"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/image/erofs"
)

// Limits bound what an image may unpack to. Zero fields take the defaults.
type Limits struct {
	Bytes   int64 // contents of all files of all layers, default 64 GiB
	Entries int   // files of all layers, default 2 million
	// MetadataBytes bounds names, link targets and extended attributes, which are kept
	// in memory. Default 512 MiB.
	MetadataBytes int64
}

func (l Limits) withDefaults() Limits {
	if l.Bytes == 0 {
		l.Bytes = 64 << 30
	}
	if l.Entries == 0 {
		l.Entries = 2_000_000
	}
	if l.MetadataBytes == 0 {
		l.MetadataBytes = 512 << 20
	}
	return l
}

// streamBytes bounds the tar streams themselves: contents, headers and padding.
func (l Limits) streamBytes() int64 { return l.Bytes + l.Bytes/4 + 64<<20 }

const (
	whiteoutPrefix  = ".wh."
	whiteoutOpaque  = ".wh..wh..opq"
	whiteoutSpecial = ".wh..wh." // other names of this form are bookkeeping of old tools
	xattrRecord     = "SCHILY.xattr."

	// objectBytes is about what one object takes in memory beside its strings.
	objectBytes = 256
)

// flattener applies layers, lowest first, to a tree and stores file contents as they come.
type flattener struct {
	tree   *tree
	out    *erofs.Writer
	limits Limits

	entries         int
	bytes, metadata int64
}

func newFlattener(out *erofs.Writer, l Limits) *flattener {
	return &flattener{tree: newTree(out.Free), out: out, limits: l}
}

// apply reads one layer's tar stream up to its end.
func (f *flattener) apply(r io.Reader, layer int) error {
	tr := tar.NewReader(r)
	for {
		hdr, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read tar: %w", err)
		}
		if err := f.count(hdr); err != nil {
			return err
		}
		if err := f.entry(hdr, tr, layer); err != nil {
			return err
		}
	}
}

func (f *flattener) count(hdr *tar.Header) error {
	f.entries++
	f.metadata += objectBytes + int64(len(hdr.Name)+len(hdr.Linkname))
	for k, v := range hdr.PAXRecords {
		f.metadata += int64(len(k) + len(v))
	}
	if isRegular(hdr) {
		f.bytes += hdr.Size
	}
	hint := "the node's limits on images can be raised in its configuration"
	switch {
	case f.entries > f.limits.Entries:
		return cube.Errorf(cube.CodeInvalid, "the image has more than %d files", f.limits.Entries).WithHint("%s", hint)
	case f.bytes > f.limits.Bytes || f.bytes < 0:
		return cube.Errorf(cube.CodeInvalid, "the image unpacks to more than %d bytes", f.limits.Bytes).WithHint("%s", hint)
	case f.metadata > f.limits.MetadataBytes:
		return cube.Errorf(cube.CodeInvalid, "names and attributes of the image take more than %d bytes", f.limits.MetadataBytes).WithHint("%s", hint)
	}
	return nil
}

func isRegular(hdr *tar.Header) bool {
	switch hdr.Typeflag {
	case tar.TypeReg, tar.TypeCont, tar.TypeGNUSparse, '\x00':
		return true
	}
	return false
}

// entry applies one entry of the layer.
func (f *flattener) entry(hdr *tar.Header, content io.Reader, layer int) error {
	if hdr.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	parts, err := splitPath(hdr.Name)
	if err != nil {
		return err
	}
	if len(parts) == 0 {
		return f.rootEntry(hdr)
	}
	base := parts[len(parts)-1]
	if strings.HasPrefix(base, whiteoutPrefix) {
		return f.whiteout(hdr, parts, layer)
	}
	parent, err := f.tree.dir(parts[:len(parts)-1], walk{layer: layer, create: true, mtime: hdr.ModTime})
	if err != nil {
		return fmt.Errorf("entry %q: %w", hdr.Name, err)
	}
	obj, err := f.object(hdr, content)
	if err != nil {
		return fmt.Errorf("entry %q: %w", hdr.Name, err)
	}
	return f.tree.put(parent, base, obj, layer)
}

// rootEntry takes the attributes of the root directory.
func (f *flattener) rootEntry(hdr *tar.Header) error {
	if hdr.Typeflag != tar.TypeDir {
		return invalid("entry %q is the root and no directory", hdr.Name)
	}
	obj, err := newObject(hdr, erofs.ModeDir)
	if err != nil {
		return fmt.Errorf("entry %q: %w", hdr.Name, err)
	}
	obj.names = 1
	f.tree.root.obj = obj
	return nil
}

func (f *flattener) whiteout(hdr *tar.Header, parts []string, layer int) error {
	base := parts[len(parts)-1]
	if base != whiteoutOpaque && strings.HasPrefix(base, whiteoutSpecial) {
		return nil
	}
	parent, err := f.tree.dir(parts[:len(parts)-1], walk{layer: layer, create: true, mtime: hdr.ModTime})
	if err != nil {
		return fmt.Errorf("whiteout %q: %w", strings.Join(parts, "/"), err)
	}
	name := strings.TrimPrefix(base, whiteoutPrefix)
	switch {
	case name == "" || name == "." || name == "..":
		return invalid("whiteout %q names nothing", strings.Join(parts, "/"))
	case base == whiteoutOpaque:
		return f.tree.hideChildren(parent, layer)
	}
	return f.tree.hide(parent, name, layer)
}

// object returns what the entry describes: something new or, for a hard link, something
// that exists.
func (f *flattener) object(hdr *tar.Header, content io.Reader) (*object, error) {
	switch {
	case isRegular(hdr):
		return f.regular(hdr, content)
	case hdr.Typeflag == tar.TypeLink:
		return f.linkTarget(hdr.Linkname)
	case hdr.Typeflag == tar.TypeDir:
		return newObject(hdr, erofs.ModeDir)
	case hdr.Typeflag == tar.TypeSymlink:
		return symlink(hdr)
	case hdr.Typeflag == tar.TypeChar:
		return device(hdr, erofs.ModeChar)
	case hdr.Typeflag == tar.TypeBlock:
		return device(hdr, erofs.ModeBlock)
	case hdr.Typeflag == tar.TypeFifo:
		return newObject(hdr, erofs.ModeFIFO)
	}
	return nil, invalid("unknown type %q", hdr.Typeflag)
}

func (f *flattener) regular(hdr *tar.Header, content io.Reader) (*object, error) {
	obj, err := newObject(hdr, erofs.ModeRegular)
	if err != nil {
		return nil, err
	}
	obj.Data, err = f.out.Add(content, hdr.Size, obj.Xattrs)
	return obj, err
}

func (f *flattener) linkTarget(name string) (*object, error) {
	parts, err := splitPath(name)
	if err != nil {
		return nil, err
	}
	var target *node
	if len(parts) > 0 {
		parent, err := f.tree.dir(parts[:len(parts)-1], walk{})
		if err != nil {
			return nil, err
		}
		if parent != nil {
			target = parent.children[parts[len(parts)-1]]
		}
	}
	switch {
	case target == nil:
		return nil, invalid("hard link to %q, which does not exist", name)
	case target.isDir():
		return nil, invalid("hard link to %q, which is a directory", name)
	}
	return target.obj, nil
}

func symlink(hdr *tar.Header) (*object, error) {
	switch n := len(hdr.Linkname); {
	case n == 0:
		return nil, invalid("symbolic link to nothing")
	case n > erofs.MaxTargetLen:
		return nil, invalid("symbolic link to a path of %d bytes, at most %d are possible", n, erofs.MaxTargetLen)
	case strings.ContainsRune(hdr.Linkname, 0):
		return nil, invalid("symbolic link to a path with a zero byte")
	}
	obj, err := newObject(hdr, erofs.ModeSymlink)
	if err != nil {
		return nil, err
	}
	obj.Mode = erofs.ModeSymlink | 0o777
	obj.Target = hdr.Linkname
	return obj, nil
}

func device(hdr *tar.Header, mode uint16) (*object, error) {
	rdev, err := erofs.Device(hdr.Devmajor, hdr.Devminor)
	if err != nil {
		return nil, invalid("%w", err)
	}
	obj, err := newObject(hdr, mode)
	if err != nil {
		return nil, err
	}
	obj.Rdev = rdev
	return obj, nil
}

// newObject takes the attributes that objects of every type have.
func newObject(hdr *tar.Header, mode uint16) (*object, error) {
	const noID = 1<<32 - 1
	if hdr.Uid < 0 || hdr.Uid >= noID || hdr.Gid < 0 || hdr.Gid >= noID {
		return nil, invalid("owner %d:%d is out of range", hdr.Uid, hdr.Gid)
	}
	xattrs, err := xattrsOf(hdr)
	if err != nil {
		return nil, err
	}
	return &object{Inode: erofs.Inode{
		Mode:      mode | uint16(hdr.Mode&0o7777),
		UID:       uint32(hdr.Uid),
		GID:       uint32(hdr.Gid),
		MTime:     hdr.ModTime.Unix(),
		MTimeNsec: uint32(hdr.ModTime.Nanosecond()),
		Xattrs:    xattrs,
	}}, nil
}

// xattrsOf returns the extended attributes that a Linux guest can have. Those of overlay
// file systems are left out: they would make files of the image invisible in the guest.
func xattrsOf(hdr *tar.Header) (map[string]string, error) {
	var xattrs map[string]string
	total := 0
	for record, value := range hdr.PAXRecords {
		name, ok := strings.CutPrefix(record, xattrRecord)
		if !ok || !erofs.KnownXattr(name) || strings.HasPrefix(name, "trusted.overlay.") || strings.HasPrefix(name, "user.overlay.") {
			continue
		}
		if err := erofs.CheckXattr(name, value); err != nil {
			return nil, invalid("%w", err)
		}
		if total += len(name) + len(value) + 16; total > erofs.MaxXattrBytes {
			return nil, invalid("extended attributes of more than %d bytes", erofs.MaxXattrBytes)
		}
		if xattrs == nil {
			xattrs = map[string]string{}
		}
		xattrs[name] = value
	}
	return xattrs, nil
}
