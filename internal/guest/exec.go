package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/agent/wire"
	"github.com/cubesandbox/cubelet/internal/guestapi"
)

// Exec starts a program and returns once it runs. The session ends with ctx; the program
// does not. Codes: Invalid (no such user, directory or program), PermissionDenied (wrong
// token), Unavailable (the guest does not answer), DeadlineExceeded, Canceled.
func (c *Client) Exec(ctx context.Context, dial guestapi.Dialer, token string, spec cube.ExecSpec) (cube.ExecSession, error) {
	s, err := start(ctx, dial, token, spec)
	if err != nil {
		return nil, fmt.Errorf("exec: %w", err)
	}
	return s, nil
}

func start(ctx context.Context, dial guestapi.Dialer, token string, spec cube.ExecSpec) (*session, error) {
	msg := startMessage(token, spec)
	payload := msg.Encode()
	if len(payload) > wire.MaxRequest {
		return nil, cube.Errorf(cube.CodeInvalid, "the arguments and variables are larger than %d bytes", wire.MaxRequest)
	}
	conn, stop, err := open(ctx, dial, wire.AppendFrame([]byte{wire.Magic}, wire.KindStart, payload))
	if err != nil {
		return nil, err
	}
	frames := &wire.Reader{R: conn, Max: wire.MaxReply}
	pid, err := started(ctx, frames)
	if err != nil {
		stop()
		return nil, err
	}
	s := &session{
		ctx: ctx, conn: conn, stop: stop, tty: spec.TTY != nil,
		events: make(chan received, eventQueue), closed: make(chan struct{}), ended: make(chan struct{}),
		credit: wire.Window, refill: make(chan struct{}, 1),
	}
	s.events <- received{ev: cube.ExecEvent{PID: pid}}
	go s.receive(frames)
	return s, nil
}

func startMessage(token string, spec cube.ExecSpec) wire.Start {
	m := wire.Start{
		Token: token, Args: spec.Args, Env: spec.Env, Cwd: spec.Cwd, User: spec.User, Stdin: spec.Stdin,
	}
	if spec.TTY != nil {
		m.PTY, m.Cols, m.Rows = true, spec.TTY.Cols, spec.TTY.Rows
	}
	if spec.Timeout > 0 {
		m.TimeoutMs = max(spec.Timeout.Milliseconds(), 1)
	}
	return m
}

// started reads the answer to a start.
func started(ctx context.Context, frames *wire.Reader) (pid uint32, err error) {
	kind, payload, err := frames.Next()
	if err != nil {
		return 0, unreachable(ctx, err)
	}
	if kind == wire.KindError {
		return 0, agentError(payload)
	}
	n, err := wire.DecodeNumber(payload)
	if kind != wire.KindStarted || err != nil || n == 0 || n > 1<<31 {
		return 0, cube.Errorf(cube.CodeInternal, "the guest agent did not begin with the program's PID")
	}
	return uint32(n), nil
}

// eventQueue is how many events are read ahead, each of at most wire.MaxReply bytes. It
// lets input go on, up to a point, while nobody reads the output.
const eventQueue = 8

type received struct {
	ev  cube.ExecEvent
	err error
}

// session implements cube.ExecSession. One goroutine receives.
type session struct {
	ctx    context.Context // of Exec
	conn   net.Conn
	stop   func()
	tty    bool
	events chan received

	closeOnce sync.Once
	closed    chan struct{} // closed by Close
	ended     chan struct{} // closed when nothing more will be received

	writeMu sync.Mutex // one frame at a time

	creditMu sync.Mutex
	credit   int           // bytes of input that may still be sent
	refill   chan struct{} // holds a token when credit may have grown
}

// receive reads frames until the end and queues them as events.
func (s *session) receive(frames *wire.Reader) {
	defer func() {
		close(s.ended) // before the connection: what fails from now on fails for that reason
		s.stop()       // the agent waits for it
		close(s.events)
	}()
	for {
		r, ok := s.next(frames)
		if !ok {
			continue
		}
		select {
		case s.events <- r:
		case <-s.closed:
			return
		}
		if r.err != nil || r.ev.Exit != nil {
			return
		}
	}
}

// next reads one frame; ok is false when it is no event.
func (s *session) next(frames *wire.Reader) (r received, ok bool) {
	kind, payload, err := frames.Next()
	if err != nil {
		return received{err: s.lost(err)}, true
	}
	switch kind {
	case wire.KindStdout:
		return output(cube.StreamStdout, payload), true
	case wire.KindStderr:
		return output(cube.StreamStderr, payload), true
	case wire.KindPTY:
		return output(cube.StreamTTY, payload), true
	case wire.KindAck:
		n, err := wire.DecodeNumber(payload)
		if err == nil && s.acked(n) {
			return received{}, false
		}
	case wire.KindError:
		return received{err: agentError(payload)}, true
	case wire.KindEnd:
		var end wire.End
		if end.Decode(payload) == nil {
			return received{ev: cube.ExecEvent{Exit: exitOf(&end)}}, true
		}
	default:
	}
	return received{err: cube.Errorf(cube.CodeInternal, "the guest agent sent a frame of kind %d that cannot be read", kind)}, true
}

func output(s cube.ExecStream, b []byte) received {
	return received{ev: cube.ExecEvent{Stream: s, Data: append([]byte(nil), b...)}}
}

// lost is the error of a connection that broke before the end.
func (s *session) lost(err error) error {
	select {
	case <-s.closed:
		return cube.Errorf(cube.CodeCanceled, "the session is closed")
	default:
	}
	if errors.Is(err, io.EOF) {
		err = errors.New("the guest agent ended the call early")
	}
	return unreachable(s.ctx, err)
}

// Recv implements cube.ExecSession.
func (s *session) Recv() (cube.ExecEvent, error) {
	r, ok := <-s.events
	if !ok {
		return cube.ExecEvent{}, io.EOF
	}
	return r.ev, r.err
}

// acked returns credit and reports whether the agent had any to return.
func (s *session) acked(n uint64) bool {
	s.creditMu.Lock()
	defer s.creditMu.Unlock()
	if n > uint64(wire.Window-s.credit) {
		return false
	}
	s.credit += int(n)
	select {
	case s.refill <- struct{}{}:
	default:
	}
	return true
}

// takeCredit takes at most n bytes of credit, 0 when there is none.
func (s *session) takeCredit(n int) int {
	s.creditMu.Lock()
	defer s.creditMu.Unlock()
	n = min(n, s.credit)
	s.credit -= n
	return n
}

// SendStdin implements cube.ExecSession. It returns when b is on its way and the program
// took all but the last wire.Window bytes of its input.
func (s *session) SendStdin(b []byte) error {
	const piece = 32 << 10
	for len(b) > 0 {
		n := s.takeCredit(min(len(b), piece))
		if n == 0 {
			select {
			case <-s.refill:
				continue
			case <-s.ended:
				return errEnded()
			case <-s.closed:
				return errEnded()
			}
		}
		if err := s.send(wire.KindStdin, b[:n]); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

func errEnded() error { return cube.Errorf(cube.CodeNotFound, "the program has ended") }

// send writes one frame.
func (s *session) send(k wire.Kind, payload []byte) error {
	select {
	case <-s.ended:
		return errEnded()
	default:
	}
	s.writeMu.Lock()
	defer s.writeMu.Unlock()
	_, err := s.conn.Write(wire.AppendFrame(nil, k, payload))
	if err == nil {
		return nil
	}
	select {
	case <-s.ended: // and receive closed the connection meanwhile
		return errEnded()
	default:
		return s.lost(err)
	}
}

// CloseStdin implements cube.ExecSession. On a terminal it types an end-of-file.
func (s *session) CloseStdin() error {
	if s.tty {
		const endOfFile = 4
		return s.SendStdin([]byte{endOfFile})
	}
	return s.send(wire.KindCloseStdin, nil)
}

// Signal implements cube.ExecSession.
func (s *session) Signal(sig int) error {
	const maxSignal = 64
	if sig < 1 || sig > maxSignal {
		return cube.InvalidField("signal", "%d is not a signal's number", sig)
	}
	return s.send(wire.KindSignal, wire.EncodeNumber(uint64(sig)))
}

// Resize implements cube.ExecSession.
func (s *session) Resize(ws cube.WindowSize) error {
	return s.send(wire.KindResize, wire.EncodeSize(ws.Cols, ws.Rows))
}

// Close implements cube.ExecSession.
func (s *session) Close() error {
	s.closeOnce.Do(func() {
		close(s.closed)
		s.stop()
	})
	<-s.ended
	return nil
}
