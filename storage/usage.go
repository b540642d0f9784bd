package storage

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
)

// The extent map of <linux/fiemap.h>.
const (
	fsIocFiemap        = 0xc020660b
	fiemapExtentLast   = 0x1
	fiemapExtentShared = 0x2000
	fiemapBatch        = 256 // extents per call
)

type fiemapExtent struct {
	Logical, Physical, Length uint64
	_                         [2]uint64
	Flags                     uint32
	_                         [3]uint32
}

type fiemap struct {
	Start, Length                   uint64
	Flags, Mapped, Count, _reserved uint32
	Extents                         [fiemapBatch]fiemapExtent
}

// usageOf measures a file by its extent map. All of a file with several names counts as
// shared, since a delete of one name frees nothing.
func usageOf(path string) (u cube.Usage, err error) {
	f, err := os.Open(path)
	if err != nil {
		return u, err
	}
	defer f.Close() // read only
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return u, err
	}
	u.Logical = st.Size
	m := &fiemap{}
	for {
		m.Length, m.Mapped, m.Count = ^uint64(0)-m.Start, 0, fiemapBatch
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), fsIocFiemap, uintptr(unsafe.Pointer(m)))
		if errors.Is(errno, unix.EOPNOTSUPP) {
			u.Exclusive = st.Blocks * 512
			return u, nil
		}
		if errno != 0 {
			return u, fmt.Errorf("extent map of %s: %w", path, errno)
		}
		for _, e := range m.Extents[:m.Mapped] {
			if e.Flags&fiemapExtentShared != 0 || st.Nlink > 1 {
				u.Shared += int64(e.Length)
			} else {
				u.Exclusive += int64(e.Length)
			}
			if e.Flags&fiemapExtentLast != 0 {
				return u, nil
			}
			m.Start = e.Logical + e.Length
		}
		if m.Mapped == 0 {
			return u, nil
		}
	}
}
