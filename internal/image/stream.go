package image

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	cube "github.com/cubesandbox/cubelet"
)

const (
	// maxWindow bounds what a zstd stream can make its reader allocate.
	maxWindow = 128 << 20
	readAhead = 256 << 10
)

// source reads from a file or content store of this node and stops with its context. Its
// errors are the node's, not the image's.
type source struct {
	ctx  context.Context
	r    io.Reader
	read func(n int) // told of bytes, may be nil
}

func newSource(ctx context.Context, r io.Reader, read func(n int)) *bufio.Reader {
	return bufio.NewReaderSize(&source{ctx, r, read}, readAhead)
}

// Read implements io.Reader.
func (s *source) Read(b []byte) (int, error) {
	if err := s.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := s.r.Read(b)
	if n > 0 && s.read != nil {
		s.read(n)
	}
	if err != nil && !errors.Is(err, io.EOF) && cube.CodeOf(err) == cube.CodeInternal {
		err = cube.Errorf(cube.CodeInternal, "%w", err)
	}
	return n, err
}

// classify makes an error that is not classified yet, and so comes from the content of an
// image, CodeInvalid.
func classify(err error) error {
	var known *cube.Error
	if err == nil || errors.As(err, &known) || cube.CodeOf(err) != cube.CodeInternal {
		return err
	}
	return cube.Errorf(cube.CodeInvalid, "%w", err)
}

// decompress returns what r holds, by its first bytes: gzip, zstd, or r itself. The
// caller closes the reader.
func decompress(r *bufio.Reader) (_ io.ReadCloser, compressed bool, err error) {
	head, err := r.Peek(4)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, false, err
	}
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		z, err := gzip.NewReader(r)
		if err != nil {
			return nil, false, fmt.Errorf("gzip: %w", err)
		}
		return z, true, nil
	case bytes.HasPrefix(head, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return nil, false, fmt.Errorf("zstd: %w", err)
		}
		return z.IOReadCloser(), true, nil
	}
	return io.NopCloser(r), false, nil
}

// streamLimit fails when more than left bytes are read.
type streamLimit struct {
	r    io.Reader
	left int64
	all  int64
}

func limitStream(r io.Reader, n int64) *streamLimit { return &streamLimit{r, n, n} }

// Read implements io.Reader.
func (l *streamLimit) Read(b []byte) (int, error) {
	n, err := l.r.Read(b)
	if l.left -= int64(n); l.left < 0 {
		return 0, cube.Errorf(cube.CodeInvalid, "unpacks to more than %d bytes", l.all).
			WithHint("the node's limits on images can be raised in its configuration")
	}
	return n, err
}

// checkedWriter calls check every few MiB.
type checkedWriter struct {
	w     io.Writer
	check func() error
	since int
}

// Write implements io.Writer.
func (c *checkedWriter) Write(b []byte) (int, error) {
	if c.since += len(b); c.since > 16<<20 {
		c.since = 0
		if err := c.check(); err != nil {
			return 0, err
		}
	}
	return c.w.Write(b)
}
