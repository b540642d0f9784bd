package erofs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

var errTooBig = errors.New("the image exceeds 16 TiB")

// SourceError is an error of the reader that a file's contents come from, as opposed to
// one of the image file.
type SourceError struct{ Err error }

// Error returns the text of the cause.
func (e *SourceError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *SourceError) Unwrap() error { return e.Err }

// Writer writes one image. It is not safe for concurrent use.
type Writer struct {
	f     *os.File
	spool *os.File // tails, in the order in which they came
	next  int64    // next free block of f
	tails int64    // length of spool
	buf   []byte
	check func() error
	since int64 // bytes written since the last check
}

const (
	maxBlocks     = 1<<32 - 1
	bufferSize    = 1 << 20
	checkInterval = 16 << 20 // bytes between two calls of Options.Check
)

// Options configures a Writer.
type Options struct {
	// File receives the image. It is empty and seekable, and stays the caller's.
	File *os.File
	// Spool is an empty temporary file for small contents. It stays the caller's.
	Spool *os.File
	// Check, when set, is called every few MiB; its error stops the write.
	Check func() error
}

// NewWriter returns a Writer.
func NewWriter(o Options) *Writer {
	if o.Check == nil {
		o.Check = func() error { return nil }
	}
	return &Writer{f: o.File, spool: o.Spool, next: 1, buf: make([]byte, bufferSize), check: o.Check}
}

// Add stores size bytes of r as the contents of a file that has those extended
// attributes. Fewer bytes are a SourceError that wraps io.ErrUnexpectedEOF.
func (w *Writer) Add(r io.Reader, size int64, xattrs map[string]string) (Extent, error) {
	if w.next+size>>blockBits+1 > maxBlocks {
		return Extent{}, errTooBig
	}
	e := Extent{Size: size, block: uint32(w.next), tail: -1}
	tail := size % blockSize
	inline := tail > 0 && fitsInline(tail, xattrs)
	if !inline {
		tail = 0
	}
	if err := w.blocks(r, size-tail); err != nil {
		return Extent{}, err
	}
	if !inline {
		return e, nil
	}
	e.tail = w.tails
	if err := w.addTail(r, tail); err != nil {
		return Extent{}, err
	}
	return e, nil
}

// blocks copies n bytes to the next free blocks, leaving holes for zeros.
func (w *Writer) blocks(r io.Reader, n int64) error {
	off := w.next << blockBits
	w.next += (n + blockSize - 1) >> blockBits
	for n > 0 {
		b := w.buf[:min(n, bufferSize)]
		if err := readFull(r, b); err != nil {
			return err
		}
		if err := w.writeSparse(b, off); err != nil {
			return err
		}
		n -= int64(len(b))
		off += int64(len(b))
	}
	return nil
}

func (w *Writer) addTail(r io.Reader, n int64) error {
	b := w.buf[:n]
	if err := readFull(r, b); err != nil {
		return err
	}
	if _, err := w.spool.WriteAt(b, w.tails); err != nil {
		return fmt.Errorf("write spool: %w", err)
	}
	w.tails += n
	return w.wrote(n)
}

func readFull(r io.Reader, b []byte) error {
	_, err := io.ReadFull(r, b)
	if err == nil {
		return nil
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return &SourceError{Err: err}
}

// writeSparse writes the runs of b whose blocks are not all zeros.
func (w *Writer) writeSparse(b []byte, off int64) error {
	var zero [blockSize]byte
	start := 0
	flush := func(end int) error {
		if end <= start {
			return nil
		}
		if _, err := w.f.WriteAt(b[start:end], off+int64(start)); err != nil {
			return fmt.Errorf("write image: %w", err)
		}
		return w.wrote(int64(end - start))
	}
	for i := 0; i < len(b); i += blockSize {
		end := min(i+blockSize, len(b))
		if !bytes.Equal(b[i:end], zero[:end-i]) {
			continue
		}
		if err := flush(i); err != nil {
			return err
		}
		start = end
	}
	return flush(len(b))
}

func (w *Writer) wrote(n int64) error {
	if w.since += n; w.since < checkInterval {
		return nil
	}
	w.since = 0
	return w.check()
}

// Free gives the disk space of contents back that no inode refers to any more.
func (w *Writer) Free(e Extent) error {
	n := e.Size
	if e.tail >= 0 {
		n -= e.Size % blockSize
	}
	n = (n + blockSize - 1) >> blockBits << blockBits
	if n == 0 {
		return nil
	}
	err := unix.Fallocate(int(w.f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(e.block)<<blockBits, n)
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("punch hole into image: %w", err)
	}
	return nil
}
