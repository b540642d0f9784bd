// Package wire is the private protocol between the host and the guest agent.
//
// It does what E2B's protocol does for the host's own calls, with far less code in the
// guest: in the first second after a restore an emulated guest pays for each instruction
// it has not run before, and HTTP, Connect, protobuf and JSON are many. It shares the
// agent's port: a connection begins with the byte Magic, which no HTTP request does.
//
// A connection is one call. After Magic the client sends frames: a length (4 bytes,
// big-endian, of what follows the kind), a kind (1 byte) and a payload.
//
//	Init   -> OK | Error
//	Start  -> Started, then Stdout, Stderr, PTY and Ack in any order, then End | Error
//
// While its program runs, the client of a Start sends Stdin, CloseStdin, Signal and
// Resize. It may have Window bytes of Stdin on the way that no Ack has taken off again,
// so that a program that reads nothing does not hold up a signal. Closing the connection
// leaves the program running.
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// Magic is the first byte of a connection.
const Magic = 0xcb

// Kind tells what a frame means.
type Kind byte

// The kinds of frames.
const (
	KindInit Kind = iota + 1
	KindStart
	KindStdin      // payload: bytes for the program
	KindCloseStdin // no payload
	KindSignal     // payload: Number
	KindResize     // payload: Size
	KindOK         // no payload
	KindError      // payload: Error
	KindStarted    // payload: Number, the PID
	KindStdout     // payload: bytes
	KindStderr     // payload: bytes
	KindPTY        // payload: bytes
	KindAck        // payload: Number, bytes of Stdin that the program took
	KindEnd        // payload: End
)

// Limits, in bytes.
const (
	// MaxRequest bounds a frame from the host, MaxReply one from a guest.
	MaxRequest = 8 << 20
	MaxReply   = 256 << 10
	// Window is how much Stdin may be on the way.
	Window = 256 << 10
)

const headerSize = 5

// AppendFrame appends a frame to b.
func AppendFrame(b []byte, k Kind, payload []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, uint32(len(payload)))
	b = append(b, byte(k))
	return append(b, payload...)
}

// ErrTooLarge is returned for a frame above the limit.
var ErrTooLarge = errors.New("frame is too large")

// Reader reads frames. Its zero value needs R and Max.
type Reader struct {
	R   io.Reader
	Max int // of a payload, in bytes

	buf        []byte
	start, end int // of what is read and not yet returned
}

// Next returns the next frame. Its payload is valid until the call after it. The error
// is io.EOF only between frames.
func (r *Reader) Next() (Kind, []byte, error) {
	if err := r.fill(headerSize); err != nil {
		return 0, nil, err
	}
	h := r.buf[r.start:]
	n := int(binary.BigEndian.Uint32(h))
	k := Kind(h[4])
	if n > r.Max {
		return 0, nil, fmt.Errorf("%w: %d bytes", ErrTooLarge, n)
	}
	if err := r.fill(headerSize + n); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return 0, nil, err
	}
	payload := r.buf[r.start+headerSize : r.start+headerSize+n]
	r.start += headerSize + n
	return k, payload, nil
}

// fill reads until n bytes are there. The buffer grows with what arrives, not with what
// is announced.
func (r *Reader) fill(n int) error {
	const first, most = 4 << 10, 64 << 10
	for r.end-r.start < n {
		if r.start > 0 {
			r.end = copy(r.buf, r.buf[r.start:r.end])
			r.start = 0
		}
		if r.end == len(r.buf) {
			grown := make([]byte, max(first, len(r.buf)+min(len(r.buf), most)))
			copy(grown, r.buf[:r.end])
			r.buf = grown
		}
		got, err := r.R.Read(r.buf[r.end:])
		r.end += got
		if got > 0 {
			continue
		}
		if errors.Is(err, io.EOF) && r.end > 0 {
			return io.ErrUnexpectedEOF
		}
		if err != nil {
			return err
		}
	}
	return nil
}
