package initramfs

import (
	"fmt"
	"io"
)

// File types of a cpio entry's mode.
const (
	modeRegular = 0o100000
	modeDir     = 0o040000
	modeChar    = 0o020000
)

// entry is one file of an archive, owned by root, with modification time zero.
type entry struct {
	name         string // without a leading slash
	mode         uint32 // type and permissions
	major, minor uint32 // of a device node
	data         []byte
}

// archive writes the kernel's newc format (Documentation/driver-api/early-userspace/
// buffer-format.rst). The cpio package that the tests read it with cannot write device
// nodes. The first error sticks and is returned by close.
type archive struct {
	w     io.Writer
	inode int
	err   error
}

func (a *archive) add(e entry) {
	a.inode++
	links := 1
	if e.mode&modeDir != 0 {
		links = 2
	}
	a.header(a.inode, links, e)
	a.put(e.data)
	a.pad(len(e.data))
}

func (a *archive) header(inode, links int, e entry) {
	const headerSize = 110
	header := fmt.Sprintf("070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%s\x00",
		inode, e.mode, 0, 0, links, 0, len(e.data), 0, 0, e.major, e.minor, len(e.name)+1, 0, e.name)
	a.put([]byte(header))
	a.pad(headerSize + len(e.name) + 1)
}

// pad fills up to the next multiple of four after n bytes.
func (a *archive) pad(n int) { a.put(make([]byte, (4-n%4)%4)) }

func (a *archive) put(b []byte) {
	if a.err == nil {
		_, a.err = a.w.Write(b)
	}
}

func (a *archive) close() error {
	a.header(0, 1, entry{name: "TRAILER!!!"})
	return a.err
}
