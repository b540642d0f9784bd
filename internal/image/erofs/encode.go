package erofs

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"slices"
)

// writeContents writes what directories and links hold beside what follows their inodes.
func (w *Writer) writeContents(l *layout) error {
	for _, n := range l.order {
		whole := n.size - n.inline
		if whole == 0 || n.Mode&ModeType == ModeRegular {
			continue
		}
		if _, err := w.f.WriteAt(l.render(n)[:whole], int64(n.block)<<blockBits); err != nil {
			return fmt.Errorf("write image: %w", err)
		}
		if err := w.wrote(whole); err != nil {
			return err
		}
	}
	return nil
}

// render returns the contents of a directory or symbolic link.
func (l *layout) render(n *Inode) []byte {
	if !n.IsDir() {
		return []byte(n.Target)
	}
	b := make([]byte, 0, n.size)
	for i, start := range n.cuts {
		end := len(n.names)
		if i+1 < len(n.cuts) {
			end = n.cuts[i+1]
		}
		if pad := i*blockSize - len(b); pad > 0 {
			b = append(b, make([]byte, pad)...)
		}
		b = n.appendDirents(b, n.names[start:end])
	}
	return b
}

// appendDirents appends one directory block: the entries, then the names.
func (n *Inode) appendDirents(b []byte, names []string) []byte {
	nameOff := len(names) * direntSize
	for _, name := range names {
		child := n.child(name)
		b = binary.LittleEndian.AppendUint64(b, child.nid)
		b = binary.LittleEndian.AppendUint16(b, uint16(nameOff))
		b = append(b, fileType(child.Mode), 0)
		nameOff += len(name)
	}
	for _, name := range names {
		b = append(b, name...)
	}
	return b
}

func (n *Inode) child(name string) *Inode {
	switch name {
	case ".":
		return n
	case "..":
		return n.parent
	}
	return n.Children[name]
}

func fileType(mode uint16) byte {
	switch mode & ModeType {
	case ModeRegular:
		return 1
	case ModeDir:
		return 2
	case ModeChar:
		return 3
	case ModeBlock:
		return 4
	case ModeFIFO:
		return 5
	case ModeSocket:
		return 6
	case ModeSymlink:
		return 7
	}
	return 0
}

// writeInodes writes every inode with its extended attributes and inline contents.
func (w *Writer) writeInodes(l *layout) error {
	base := l.meta << blockBits
	out := bufio.NewWriterSize(io.NewOffsetWriter(w.f, base), bufferSize)
	var off int64
	var b []byte
	for _, n := range l.order {
		b = append(b[:0], make([]byte, int64(n.nid)*slotSize-off)...)
		b = appendInode(b, n)
		b = appendXattrs(b, n.Xattrs)
		switch {
		case n.inline == 0:
		case n.Mode&ModeType == ModeRegular:
			start := len(b)
			b = append(b, make([]byte, n.inline)...)
			if _, err := w.spool.ReadAt(b[start:], n.Data.tail); err != nil {
				return fmt.Errorf("read spool: %w", err)
			}
		default:
			b = append(b, l.render(n)[n.size-n.inline:]...)
		}
		if _, err := out.Write(b); err != nil {
			return fmt.Errorf("write image: %w", err)
		}
		off += int64(len(b))
		if err := w.wrote(int64(len(b))); err != nil {
			return err
		}
	}
	if err := out.Flush(); err != nil {
		return fmt.Errorf("write image: %w", err)
	}
	return nil
}

func appendInode(b []byte, n *Inode) []byte {
	layout, data := uint16(layoutPlain), n.block
	if n.inline > 0 {
		layout = layoutInline
	}
	switch n.Mode & ModeType {
	case ModeChar, ModeBlock:
		data = n.Rdev
	}
	xattrs := uint16(0)
	if size := xattrsSize(n.Xattrs); size > 0 {
		xattrs = uint16((size-xattrHeaderSize)/4 + 1)
	}
	le := binary.LittleEndian
	b = le.AppendUint16(b, 1|layout<<1) // 1: extended inode
	b = le.AppendUint16(b, xattrs)
	b = le.AppendUint16(b, n.Mode)
	b = le.AppendUint16(b, 0)
	b = le.AppendUint64(b, uint64(n.size))
	b = le.AppendUint32(b, data)
	b = le.AppendUint32(b, uint32(n.nid)) // what 32-bit user space sees as inode number
	b = le.AppendUint32(b, n.UID)
	b = le.AppendUint32(b, n.GID)
	b = le.AppendUint64(b, uint64(n.MTime))
	b = le.AppendUint32(b, n.MTimeNsec)
	b = le.AppendUint32(b, n.nlink)
	return append(b, make([]byte, 16)...)
}

func appendXattrs(b []byte, xattrs map[string]string) []byte {
	if len(xattrs) == 0 {
		return b
	}
	b = append(b, make([]byte, xattrHeaderSize)...)
	for _, name := range slices.Sorted(maps.Keys(xattrs)) {
		value := xattrs[name]
		index, suffix, _ := splitXattr(name)
		b = append(b, byte(len(suffix)), index)
		b = binary.LittleEndian.AppendUint16(b, uint16(len(value)))
		b = append(b, suffix...)
		b = append(b, value...)
		for pad := xattrEntrySize + len(suffix) + len(value); pad%4 != 0; pad++ {
			b = append(b, 0)
		}
	}
	return b
}

func (w *Writer) writeSuper(l *layout, s Super, blocks uint32) error {
	b := make([]byte, blockSize)
	sb := b[superOffset:]
	le := binary.LittleEndian
	le.PutUint32(sb[0:], superMagic)
	le.PutUint32(sb[8:], compatChecksum|compatMTime)
	sb[12] = blockBits
	le.PutUint16(sb[14:], firstInode)
	le.PutUint64(sb[16:], uint64(len(l.order)))
	le.PutUint64(sb[24:], uint64(s.BuildTime))
	le.PutUint32(sb[36:], blocks)
	le.PutUint32(sb[40:], uint32(l.meta))
	copy(sb[48:64], s.UUID[:])
	// The kernel's checksum is a CRC-32C without the final complement, over the rest of
	// the block with the checksum itself as zero.
	le.PutUint32(sb[4:], ^crc32.Checksum(sb, crc32.MakeTable(crc32.Castagnoli)))
	if _, err := w.f.WriteAt(b, 0); err != nil {
		return fmt.Errorf("write super block: %w", err)
	}
	return nil
}
