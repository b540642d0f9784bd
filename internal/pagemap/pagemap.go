// Package pagemap finds the pages of a process that differ from the file they map: of a
// private mapping those that were written, so that a memory snapshot costs what a guest
// dirtied.
package pagemap

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Range is a part of an address space: [Start, End), page-aligned.
type Range struct{ Start, End uint64 }

// Len is the range's length in bytes.
func (r Range) Len() uint64 { return r.End - r.Start }

// Dirty lists the written pages of r in a process, in the order of their addresses,
// neighbours joined. r must lie in private mappings of files; pages that were never
// touched or only read are not in the list. The process should stand still.
//
// It uses PAGEMAP_SCAN (Linux 6.7) where the kernel has it, and reads the page map entry
// by entry elsewhere. It needs the right to trace the process.
func Dirty(pid int, r Range) ([]Range, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/pagemap", pid))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	dirty, err := scan(f, r)
	if errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EINVAL) {
		dirty, err = read(f, r)
	}
	if err != nil {
		return nil, fmt.Errorf("page map of process %d: %w", pid, err)
	}
	return dirty, nil
}

// The interface of PAGEMAP_SCAN, from the kernel's include/uapi/linux/fs.h.
const (
	pagemapScan   = 0xc0606610 // _IOWR('f', 16, struct pm_scan_arg)
	pageIsFile    = 1 << 2
	pageIsPresent = 1 << 3
	pageIsSwapped = 1 << 4
	maxRegions    = 1024 // of one call
)

type scanArg struct {
	Size, Flags       uint64
	Start, End        uint64
	WalkEnd           uint64
	Vec, VecLen       uint64
	MaxPages          uint64
	CategoryInverted  uint64
	CategoryMask      uint64
	CategoryAnyofMask uint64
	ReturnMask        uint64
}

type scanRegion struct{ Start, End, Categories uint64 }

func scan(f *os.File, r Range) ([]Range, error) {
	regions := make([]scanRegion, maxRegions)
	var pin runtime.Pinner
	pin.Pin(&regions[0])
	defer pin.Unpin()
	arg := scanArg{
		Start: r.Start, End: r.End,
		Vec: uint64(uintptr(unsafe.Pointer(&regions[0]))), VecLen: maxRegions,
		// Not of the file, and there: a private copy.
		CategoryInverted: pageIsFile, CategoryMask: pageIsFile,
		CategoryAnyofMask: pageIsPresent | pageIsSwapped,
		ReturnMask:        pageIsPresent,
	}
	arg.Size = uint64(unsafe.Sizeof(arg))
	var dirty []Range
	for arg.Start < r.End {
		n, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), pagemapScan, uintptr(unsafe.Pointer(&arg)))
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			return nil, os.NewSyscallError("PAGEMAP_SCAN", errno)
		}
		for _, found := range regions[:n] {
			dirty = add(dirty, Range{found.Start, found.End})
		}
		if arg.WalkEnd <= arg.Start {
			return nil, errors.New("PAGEMAP_SCAN makes no progress")
		}
		arg.Start = arg.WalkEnd
	}
	return dirty, nil
}

// Bits of an entry, from the kernel's Documentation/admin-guide/mm/pagemap.rst.
const (
	entryBytes   = 8
	entryFile    = 1 << 61
	entrySwapped = 1 << 62
	entryPresent = 1 << 63
)

func read(f *os.File, r Range) ([]Range, error) {
	page := uint64(os.Getpagesize())
	const most = 8192 // entries of one read
	entries := make([]uint64, most)
	var dirty []Range
	for at := r.Start; at < r.End; {
		n := min(most, (r.End-at)/page)
		b := unsafe.Slice((*byte)(unsafe.Pointer(&entries[0])), n*entryBytes)
		if _, err := f.ReadAt(b, int64(at/page*entryBytes)); err != nil {
			return nil, err
		}
		for _, e := range entries[:n] {
			if e&(entryPresent|entrySwapped) != 0 && e&entryFile == 0 {
				dirty = add(dirty, Range{at, at + page})
			}
			at += page
		}
	}
	return dirty, nil
}

// add appends r, joined to the last range when they touch.
func add(list []Range, r Range) []Range {
	if n := len(list); n > 0 && list[n-1].End == r.Start {
		list[n-1].End = r.End
		return list
	}
	return append(list, r)
}
