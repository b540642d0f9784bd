package journal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
)

// bbolt trusts its file: a damaged length makes it read outside the mapping, which ends
// the process. So the file's structure is checked here before bbolt sees it, on plain
// bytes. The format is that of go.etcd.io/bbolt, version 2, on a little-endian machine.
const (
	pageHead    = 16 // id u64, flags u16, count u16, overflow u32
	metaSize    = 64 // magic, version, page size, flags u32; root, sequence, freelist, pages, txid, checksum u64
	elementSize = 16
	boltMagic   = 0xED0CDAED
	boltVersion = 2
	noFreelist  = ^uint64(0)

	flagBranch   = 0x01
	flagLeaf     = 0x02
	flagFreelist = 0x10
	bucketEntry  = 0x01
)

// boltMeta is the root of one state of the file.
type boltMeta struct {
	pageSize              int
	root, freelist, pages uint64
	txid                  uint64
}

// scanner walks the pages of a database file.
type scanner struct {
	b    []byte
	meta boltMeta
	seen map[uint64]bool // pages in use
	last []byte          // key visited last in this bucket, nil before the first
	// afterBranch tells that last is the key of a branch: its child may begin with it.
	afterBranch bool
	errs        []error
	visit       func(bucket string, key, value []byte)
}

// scanFile checks the structure of a database file and calls visit for each record that
// it can reach, also in a damaged one. The slices are parts of b.
func scanFile(b []byte, visit func(bucket string, key, value []byte)) error {
	meta, _, ok := findMeta(b)
	if !ok {
		return errors.New("neither meta page is valid")
	}
	s := &scanner{b: b, meta: meta, seen: map[uint64]bool{0: true, 1: true}, visit: visit}
	if meta.pages > uint64(len(b)/meta.pageSize) {
		s.failf("file is truncated: %d bytes, want %d pages of %d", len(b), meta.pages, meta.pageSize)
	}
	s.page(meta.root, "", true)
	if meta.freelist != noFreelist {
		s.freelist(meta.freelist)
	}
	return errors.Join(s.errs...)
}

// findMeta returns the newest valid meta page, and whether both are valid. The second
// one lies where the first one's page size says, or is searched for when the first one
// is invalid.
func findMeta(b []byte) (meta boltMeta, both, ok bool) {
	first, ok := readMeta(b, 0)
	if ok {
		second, both := readMeta(b, first.pageSize)
		if both && second.txid > first.txid {
			return second, true, true
		}
		return first, both, true
	}
	for size := 1 << 10; size <= 1<<24; size <<= 1 {
		if second, ok := readMeta(b, size); ok && second.pageSize == size {
			return second, false, true
		}
	}
	return boltMeta{}, false, false
}

func readMeta(b []byte, at int) (boltMeta, bool) {
	if len(b) < at+pageHead+metaSize {
		return boltMeta{}, false
	}
	m := b[at+pageHead : at+pageHead+metaSize]
	sum := fnv.New64a()
	sum.Write(m[:metaSize-8])
	le := binary.LittleEndian
	if le.Uint32(m) != boltMagic || le.Uint32(m[4:]) != boltVersion || le.Uint64(m[metaSize-8:]) != sum.Sum64() {
		return boltMeta{}, false
	}
	size := int(le.Uint32(m[8:]))
	if size < 1<<10 || size > 1<<24 || size&(size-1) != 0 {
		return boltMeta{}, false
	}
	return boltMeta{
		pageSize: size, root: le.Uint64(m[16:]), freelist: le.Uint64(m[32:]), pages: le.Uint64(m[40:]), txid: le.Uint64(m[48:]),
	}, true
}

func (s *scanner) failf(format string, args ...any) {
	const enough = 5 // the first ones tell what happened
	if len(s.errs) < enough {
		s.errs = append(s.errs, fmt.Errorf(format, args...))
	}
}

// load returns a page with its overflow and marks it as used. nil when it is not valid.
func (s *scanner) load(id uint64) []byte {
	size := uint64(s.meta.pageSize)
	if id < 2 || id >= s.meta.pages || (id+1)*size > uint64(len(s.b)) {
		s.failf("page %d is outside the file", id)
		return nil
	}
	head := s.b[id*size:]
	count := uint64(binary.LittleEndian.Uint32(head[12:])) + 1
	if got := binary.LittleEndian.Uint64(head); got != id {
		s.failf("page %d says that it is page %d", id, got)
		return nil
	}
	if id+count > s.meta.pages || (id+count)*size > uint64(len(s.b)) {
		s.failf("page %d with %d overflow pages ends outside the file", id, count-1)
		return nil
	}
	for i := id; i < id+count; i++ {
		if s.seen[i] {
			s.failf("page %d is used twice", i)
			return nil
		}
		s.seen[i] = true
	}
	return s.b[id*size : (id+count)*size]
}

// page walks a page and those below it. top tells that it belongs to the root bucket,
// of which the entries are buckets.
func (s *scanner) page(id uint64, bucket string, top bool) {
	p := s.load(id)
	if p == nil {
		return
	}
	switch binary.LittleEndian.Uint16(p[8:]) {
	case flagBranch:
		s.branch(id, p, bucket, top)
	case flagLeaf:
		s.leaf(fmt.Sprint("page ", id), p, bucket, top)
	default:
		s.failf("page %d is neither branch nor leaf", id)
	}
}

func (s *scanner) branch(id uint64, p []byte, bucket string, top bool) {
	count := int(binary.LittleEndian.Uint16(p[10:]))
	if count == 0 || pageHead+count*elementSize > len(p) {
		s.failf("page %d has %d branches", id, count)
		return
	}
	for i := range count {
		at := pageHead + i*elementSize
		e := p[at:]
		pos, keySize := int(binary.LittleEndian.Uint32(e)), int(binary.LittleEndian.Uint32(e[4:]))
		if at+pos+keySize > len(p) {
			s.failf("page %d: branch %d ends outside it", id, i)
			continue
		}
		if i > 0 { // keys below the first branch's own key belong to it too
			s.ascend(fmt.Sprintf("page %d: branch %d", id, i), p[at+pos:at+pos+keySize], true)
		}
		s.page(binary.LittleEndian.Uint64(e[8:]), bucket, top)
	}
}

func (s *scanner) leaf(name string, p []byte, bucket string, top bool) {
	count := int(binary.LittleEndian.Uint16(p[10:]))
	if pageHead+count*elementSize > len(p) {
		s.failf("%s has %d entries", name, count)
		return
	}
	for i := range count {
		at := pageHead + i*elementSize
		le, e := binary.LittleEndian, p[at:]
		flags, pos, keySize, valueSize := le.Uint32(e), int(le.Uint32(e[4:])), int(le.Uint32(e[8:])), int(le.Uint32(e[12:]))
		if at+pos+keySize+valueSize > len(p) {
			s.failf("%s: entry %d ends outside it", name, i)
			continue
		}
		key := p[at+pos : at+pos+keySize]
		value := p[at+pos+keySize : at+pos+keySize+valueSize]
		s.ascend(fmt.Sprintf("%s: entry %d", name, i), key, false)
		switch isBucket := flags&bucketEntry != 0; {
		case isBucket != top:
			s.failf("%s: entry %d has flags %#x", name, i, flags)
		case top:
			s.bucket(string(key), value)
		default:
			s.visit(bucket, key, value)
		}
	}
}

// ascend checks that key follows the last key, or may equal it when that was a branch.
// A record in the wrong order would be listed but not found.
func (s *scanner) ascend(name string, key []byte, branch bool) {
	c := bytes.Compare(s.last, key)
	if s.last != nil && (c > 0 || c == 0 && !s.afterBranch) {
		s.failf("%s is out of order", name)
	}
	s.last, s.afterBranch = key, branch
}

// bucket walks a bucket: its header names its root page, or zero when its only page
// follows inline.
func (s *scanner) bucket(name string, value []byte) {
	if len(value) < pageHead {
		s.failf("bucket %q has a header of %d bytes", name, len(value))
		return
	}
	outer, outerBranch := s.last, s.afterBranch
	s.last, s.afterBranch = nil, false
	defer func() { s.last, s.afterBranch = outer, outerBranch }()
	if root := binary.LittleEndian.Uint64(value); root != 0 {
		s.page(root, name, false)
		return
	}
	inline := value[pageHead:]
	if len(inline) < pageHead || binary.LittleEndian.Uint16(inline[8:]) != flagLeaf {
		s.failf("bucket %q has no page", name)
		return
	}
	s.leaf(fmt.Sprintf("bucket %q", name), inline, name, false)
}

// freelist checks that the free pages exist and are not in use. Call it last.
func (s *scanner) freelist(id uint64) {
	p := s.load(id)
	if p == nil {
		return
	}
	if flags := binary.LittleEndian.Uint16(p[8:]); flags != flagFreelist {
		s.failf("page %d is no free list", id)
		return
	}
	count, ids := uint64(binary.LittleEndian.Uint16(p[10:])), p[pageHead:]
	if count == 0xFFFF {
		count, ids = binary.LittleEndian.Uint64(ids), ids[8:]
	}
	if count > uint64(len(ids)/8) {
		s.failf("free list of %d pages in %d bytes", count, len(ids))
		return
	}
	for i := range count {
		free := binary.LittleEndian.Uint64(ids[i*8:])
		if free >= s.meta.pages || s.seen[free] {
			s.failf("page %d is free and in use, or outside the file", free)
			return
		}
		s.seen[free] = true
	}
}
