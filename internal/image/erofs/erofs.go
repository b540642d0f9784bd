// Package erofs writes EROFS images: read-only file systems that the Linux kernel mounts.
//
// The writer takes a tree of inodes whose file contents it has already stored. Contents
// are appended while they arrive, metadata follows at the end, so an image is written in
// one pass and nothing is unpacked on the host. Blocks of zeros become holes of the image
// file. Images are uncompressed and the same tree gives the same bytes.
package erofs

import (
	"fmt"
	"strings"
)

// The parts of the on-disk format that images of this package use. All numbers are
// little-endian.
const (
	blockBits = 12
	blockSize = 1 << blockBits

	superOffset = 1024
	superMagic  = 0xE0F5E1E2

	compatChecksum = 1 // the super block carries a CRC-32C
	compatMTime    = 2 // inodes record modification times

	slotSize  = 32 // inode numbers count slots of this size
	inodeSize = 64 // of an extended inode

	layoutPlain  = 0 // contents are whole blocks
	layoutInline = 2 // the last partial block follows the inode

	direntSize      = 12
	xattrHeaderSize = 12
	xattrEntrySize  = 4

	// firstInode is the root's number. Zero is no valid inode number for user space.
	firstInode = 2

	// maxInline is the longest tail that is stored behind its inode: more would waste
	// up to as much again, since an inode and its tail never cross a block.
	maxInline = 2048
)

// The limits of the format.
const (
	MaxNameBytes       = 255
	MaxXattrValueBytes = 65535
	// MaxXattrBytes bounds all extended attributes of one inode as they are stored.
	MaxXattrBytes = 4 * 65534
	MaxTargetLen  = 4095 // of a symbolic link, what Linux accepts
)

// File types of a mode, as in stat(2).
const (
	ModeType    = 0o170000
	ModeSocket  = 0o140000
	ModeSymlink = 0o120000
	ModeRegular = 0o100000
	ModeBlock   = 0o060000
	ModeDir     = 0o040000
	ModeChar    = 0o020000
	ModeFIFO    = 0o010000
)

// Inode is one object of the file system. Hard links are several names of one Inode.
type Inode struct {
	Mode      uint16 // type and permissions as in stat(2)
	UID, GID  uint32
	MTime     int64 // seconds since 1970
	MTimeNsec uint32
	Rdev      uint32 // of a device, see Device
	Target    string // of a symbolic link
	Data      Extent // of a regular file, from Writer.Add with the same Xattrs
	Xattrs    map[string]string
	Children  map[string]*Inode // of a directory

	// What follows is set by Finish.
	placed bool
	nlink  uint32
	nid    uint64
	size   int64
	inline int64    // bytes of the contents that follow the inode
	block  uint32   // of the rest of the contents
	parent *Inode   // of a directory
	names  []string // of a directory, sorted, with . and ..
	cuts   []int    // for each directory block, the index in names where it starts
}

// Extent is where the contents of one regular file are.
type Extent struct {
	Size  int64
	block uint32 // first whole block
	tail  int64  // offset in the spool of the last partial block, -1 when it is a block of its own
}

// IsDir reports whether the inode is a directory.
func (n *Inode) IsDir() bool { return n.Mode&ModeType == ModeDir }

// Device encodes a device number. Linux has 12 bits of major and 20 of minor number.
func Device(major, minor int64) (uint32, error) {
	if major < 0 || major >= 1<<12 || minor < 0 || minor >= 1<<20 {
		return 0, fmt.Errorf("no device number %d:%d", major, minor)
	}
	return uint32(minor&0xff | major<<8 | (minor&^0xff)<<12), nil
}

// xattrPrefixes maps the name spaces that the format knows to their index. The names of
// access control lists are whole.
var xattrPrefixes = [...]struct {
	prefix string
	index  byte
	whole  bool
}{
	{"system.posix_acl_access", 2, true},
	{"system.posix_acl_default", 3, true},
	{"user.", 1, false},
	{"trusted.", 4, false},
	{"security.", 6, false},
}

// splitXattr returns the index of the name's prefix and what follows it.
func splitXattr(name string) (index byte, suffix string, ok bool) {
	for _, p := range xattrPrefixes {
		if p.whole && name == p.prefix {
			return p.index, "", true
		}
		if s, found := strings.CutPrefix(name, p.prefix); found && !p.whole {
			return p.index, s, s != ""
		}
	}
	return 0, "", false
}

// KnownXattr reports whether the format has the name space of an extended attribute.
func KnownXattr(name string) bool {
	_, _, ok := splitXattr(name)
	return ok
}

// CheckXattr tells why the format cannot hold an extended attribute.
func CheckXattr(name, value string) error {
	_, suffix, ok := splitXattr(name)
	switch {
	case !ok:
		return fmt.Errorf("extended attribute %q is of no known name space", name)
	case len(suffix) > MaxNameBytes:
		return fmt.Errorf("extended attribute %.40q...: the name has %d bytes", name, len(name))
	case len(value) > MaxXattrValueBytes:
		return fmt.Errorf("extended attribute %q has %d bytes, at most %d are possible", name, len(value), MaxXattrValueBytes)
	}
	return nil
}
