package erofs

import (
	"fmt"
	"slices"
)

// Super describes the file system as a whole.
type Super struct {
	UUID      [16]byte
	BuildTime int64 // seconds since 1970
}

// layout is the plan of an image's metadata.
type layout struct {
	order []*Inode // in the order of their numbers, parents first
	meta  int64    // first block of the inodes
	size  int64    // bytes of inodes
}

// Finish writes the metadata of the tree below root and returns the size of the image in
// bytes. The image is not synced. The tree and the writer cannot be used afterwards.
func (w *Writer) Finish(root *Inode, s Super) (int64, error) {
	if !root.IsDir() {
		return 0, fmt.Errorf("the root is not a directory")
	}
	l := &layout{}
	if err := l.collect(root); err != nil {
		return 0, err
	}
	if err := l.place(w.next); err != nil {
		return 0, err
	}
	if err := w.writeContents(l); err != nil {
		return 0, err
	}
	if err := w.writeInodes(l); err != nil {
		return 0, err
	}
	blocks := l.meta + (l.size+blockSize-1)>>blockBits
	if blocks > maxBlocks {
		return 0, errTooBig
	}
	if err := w.writeSuper(l, s, uint32(blocks)); err != nil {
		return 0, err
	}
	size := blocks << blockBits
	if err := w.f.Truncate(size); err != nil {
		return 0, fmt.Errorf("set image size: %w", err)
	}
	return size, w.check()
}

// collect lists every inode once, parents before children, and counts links. It does not
// recurse: a hostile tree may be deep.
func (l *layout) collect(root *Inode) error {
	root.parent, root.placed, root.nlink = root, true, 2
	l.order = append(l.order, root)
	for i := 0; i < len(l.order); i++ {
		dir := l.order[i]
		if !dir.IsDir() {
			continue
		}
		dir.names = append(make([]string, 0, len(dir.Children)+2), ".", "..")
		for name := range dir.Children {
			dir.names = append(dir.names, name)
		}
		slices.Sort(dir.names)
		for _, name := range dir.names {
			if name == "." || name == ".." {
				continue
			}
			if err := l.add(dir, name, dir.Children[name]); err != nil {
				return err
			}
		}
	}
	return nil
}

func (l *layout) add(dir *Inode, name string, n *Inode) error {
	if name == "" || len(name) > MaxNameBytes {
		return fmt.Errorf("a name of %d bytes", len(name))
	}
	if n.placed {
		if n.IsDir() {
			return fmt.Errorf("%q is a directory with two names", name)
		}
		n.nlink++
		return nil
	}
	n.placed, n.nlink = true, 1
	if n.IsDir() {
		n.parent, n.nlink = dir, 2
		dir.nlink++
	}
	l.order = append(l.order, n)
	return nil
}

// place gives every inode its number, and the contents that are not stored yet their
// blocks, beginning with block next.
func (l *layout) place(next int64) error {
	off := int64(firstInode * slotSize)
	for _, n := range l.order {
		xattrs := xattrsSize(n.Xattrs)
		if xattrs > xattrHeaderSize+MaxXattrBytes {
			return fmt.Errorf("extended attributes of %d bytes on one inode", xattrs)
		}
		n.measure()
		if rest := n.size - n.inline; rest > 0 && n.Mode&ModeType != ModeRegular {
			n.block = uint32(next)
			next += (rest + blockSize - 1) >> blockBits
		}
		need := inodeSize + xattrs + n.inline
		if room := blockSize - off%blockSize; n.inline > 0 && need > room {
			off += room
		}
		n.nid = uint64(off / slotSize)
		off = alignUp(off+need, slotSize)
		if next > maxBlocks {
			return errTooBig
		}
	}
	l.meta, l.size = next, off
	return nil
}

// measure sets the size of the contents and how much of it follows the inode.
func (n *Inode) measure() {
	switch n.Mode & ModeType {
	case ModeRegular:
		n.size, n.block = n.Data.Size, n.Data.block
		if n.Data.tail >= 0 {
			n.inline = n.size % blockSize
		}
		return
	case ModeDir:
		n.cut()
	case ModeSymlink:
		n.size = int64(len(n.Target))
	}
	if tail := n.size % blockSize; fitsInline(tail, n.Xattrs) {
		n.inline = tail
	}
}

// fitsInline reports whether a tail and its inode can share one block.
func fitsInline(tail int64, xattrs map[string]string) bool {
	return tail <= maxInline && inodeSize+xattrsSize(xattrs)+tail <= blockSize
}

// cut splits a directory's names into blocks.
func (n *Inode) cut() {
	used := 0
	for i, name := range n.names {
		need := direntSize + len(name)
		if i == 0 || used+need > blockSize {
			n.cuts = append(n.cuts, i)
			used = 0
		}
		used += need
	}
	n.size = int64(len(n.cuts)-1)*blockSize + int64(used)
}

func xattrsSize(xattrs map[string]string) int64 {
	if len(xattrs) == 0 {
		return 0
	}
	size := int64(xattrHeaderSize)
	for name, value := range xattrs {
		_, suffix, _ := splitXattr(name)
		size += alignUp(int64(xattrEntrySize+len(suffix)+len(value)), 4)
	}
	return size
}

func alignUp(n, to int64) int64 { return (n + to - 1) / to * to }
