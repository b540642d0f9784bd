package agent

import (
	"errors"
	"net"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/cubesandbox/cubelet/internal/agent/wire"
)

// hostCall answers one call of the host; see package wire.
func (s *Server) hostCall(conn *net.TCPConn) {
	frames := &wire.Reader{R: conn, Max: wire.MaxRequest}
	kind, payload, err := frames.Next()
	if err != nil {
		return
	}
	switch kind {
	case wire.KindInit:
		err = s.hostInit(conn, payload)
	case wire.KindStart:
		err = s.hostStart(conn, frames, payload)
	default:
		err = &hostError{wire.CodeInvalid, "a call begins with init or start"}
	}
	if err != nil {
		reply := hostFault(err)
		_, _ = conn.Write(wire.AppendFrame(nil, wire.KindError, reply.Encode()))
	}
}

// hostError is an error with a code of package wire.
type hostError struct {
	code wire.ErrorCode
	text string
}

func (e *hostError) Error() string { return e.text }

func hostFault(err error) wire.Error {
	if he := (*hostError)(nil); errors.As(err, &he) {
		return wire.Error{Code: he.code, Message: he.text}
	}
	ce := (*connect.Error)(nil)
	if !errors.As(err, &ce) {
		return wire.Error{Code: wire.CodeInternal, Message: err.Error()}
	}
	out := wire.Error{Code: wire.CodeInternal, Message: ce.Message()}
	switch ce.Code() {
	case connect.CodeInvalidArgument:
		out.Code = wire.CodeInvalid
	case connect.CodeUnauthenticated:
		out.Code = wire.CodeUser
	default:
	}
	return out
}

func errToken() error {
	return &hostError{wire.CodeToken, "the access token is not the sandbox's"}
}

func (s *Server) hostInit(conn net.Conn, payload []byte) error {
	var in wire.Init
	if err := in.Decode(payload); err != nil {
		return &hostError{wire.CodeInvalid, err.Error()}
	}
	if err := s.init(&in); err != nil {
		return err
	}
	_, err := conn.Write(wire.AppendFrame(nil, wire.KindOK, nil))
	return err
}

func (s *Server) hostStart(conn *net.TCPConn, frames *wire.Reader, payload []byte) error {
	var in wire.Start
	if err := in.Decode(payload); err != nil {
		return &hostError{wire.CodeInvalid, err.Error()}
	}
	if !s.identity().accepts(in.Token) {
		return errToken()
	}
	spec := startSpec{envs: in.Env, stdin: in.Stdin, user: in.User}
	if len(in.Args) > 0 {
		spec.cmd, spec.args = in.Args[0], in.Args[1:]
	}
	if in.Cwd != "" {
		spec.cwd = &in.Cwd
	}
	if in.PTY {
		spec.pty = &ptySize{in.Cols, in.Rows}
	}
	if in.TimeoutMs > 0 {
		spec.expires = time.Now().Add(time.Duration(in.TimeoutMs) * time.Millisecond)
	}
	p, sub, err := s.start(spec)
	if err != nil {
		return err
	}
	defer sub.leave()
	h := &hostSession{conn: conn, p: p, sub: sub, gone: make(chan struct{}), acks: make(chan int, 1)}
	go h.receive(frames)
	if err := h.send(); err != nil {
		return err
	}
	// Closing with input unread would reset the connection and lose the end of the
	// output; the host closes first.
	_ = conn.CloseWrite()
	_ = conn.SetReadDeadline(time.Now().Add(closeWait))
	<-h.gone
	return nil
}

// closeWait is how long a host may take to close a connection after the end.
const closeWait = 5 * time.Second

// hostSession is a program that the host started. One goroutine sends, one receives, and
// when there is input a third passes it on.
type hostSession struct {
	conn *net.TCPConn
	p    *process
	sub  *subscriber
	out  []byte        // frames not yet written
	gone chan struct{} // closed when the host has left
	acks chan int      // bytes of input taken and not yet acknowledged
}

// send writes the output until the program ends or the host is gone.
func (h *hostSession) send() error {
	h.frame(wire.KindStarted, wire.EncodeNumber(uint64(h.p.pid)))
	for {
		h.flush()
		select {
		case <-h.gone:
			return nil
		case n := <-h.acks:
			h.frame(wire.KindAck, wire.EncodeNumber(uint64(n)))
			continue
		case <-h.sub.ready:
		}
		chunks, end, cut := h.sub.take()
		for _, c := range chunks {
			h.frame(kindOf(c.stream), c.data)
		}
		if end != nil {
			h.frame(wire.KindEnd, endOf(end).Encode())
		}
		if cut || end != nil {
			h.flush()
		}
		switch {
		case cut:
			return &hostError{wire.CodeSlow, "the host reads too slowly and lost output"}
		case end != nil:
			return nil
		}
	}
}

// frame adds a frame to what is to be written, and writes when that is much.
func (h *hostSession) frame(k wire.Kind, payload []byte) {
	h.out = wire.AppendFrame(h.out, k, payload)
	if len(h.out) >= maxRead {
		h.flush()
	}
}

func (h *hostSession) flush() {
	if len(h.out) == 0 {
		return
	}
	_, _ = h.conn.Write(h.out) // when it fails the host is gone, which receive notices
	h.out = h.out[:0]
}

func kindOf(s stream) wire.Kind {
	switch s {
	case streamStdout:
		return wire.KindStdout
	case streamStderr:
		return wire.KindStderr
	default:
		return wire.KindPTY
	}
}

func endOf(e *exit) *wire.End {
	end := &wire.End{Code: int32(e.status.ExitStatus()), Core: e.status.CoreDump(), Reason: e.reason}
	if e.status.Signaled() {
		end.Code, end.Signal = int32(e.status.Signal()), true
	}
	return end
}

// receive does what the host asks for until it leaves. Input waits in a queue that the
// window bounds, so that it never holds up a signal.
func (h *hostSession) receive(frames *wire.Reader) {
	defer close(h.gone)
	in := inputQueue{session: h}
	defer in.finish()
	for {
		kind, payload, err := frames.Next()
		if err != nil {
			return
		}
		switch kind {
		case wire.KindStdin:
			err = in.add(payload)
		case wire.KindCloseStdin:
			in.end()
		case wire.KindSignal:
			if n, err := wire.DecodeNumber(payload); err == nil && n > 0 && n <= maxSignal {
				_ = h.p.signal(syscall.Signal(n)) // a program that has ended takes no signal
			}
		case wire.KindResize:
			if cols, rows, err := wire.DecodeSize(payload); err == nil {
				_ = h.p.resize(cols, rows)
			}
		default:
			return
		}
		if err != nil {
			return
		}
	}
}
