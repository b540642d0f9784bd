package guest

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"

	"connectrpc.com/connect"

	cube "github.com/cubesandbox/cubelet"
	processpb "github.com/cubesandbox/cubelet/api/envd/process"
	"github.com/cubesandbox/cubelet/api/envd/process/processconnect"
	"github.com/cubesandbox/cubelet/internal/guestapi"
)

// timeoutHeader bounds a program's run time without bounding the call; see package agent.
const timeoutHeader = "X-Cube-Timeout-Ms"

// Exec starts a program and returns once it runs. The session ends with ctx; the program
// does not. Codes: Invalid (no such user, directory or program), PermissionDenied (wrong
// token), Unavailable (the guest does not answer), DeadlineExceeded, Canceled.
func (c *Client) Exec(ctx context.Context, dial guestapi.Dialer, token string, spec cube.ExecSpec) (cube.ExecSession, error) {
	pc, transport := newProcessClient(dial, execHeaders(token, spec))
	// A deadline of ctx would travel to the agent and become the program's.
	streamCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s := &session{ctx: streamCtx, pc: pc, transport: transport, token: token, tty: spec.TTY != nil}
	unlink := context.AfterFunc(ctx, cancel)
	s.stop = func() {
		unlink()
		cancel()
		transport.CloseIdleConnections()
	}
	stream, err := pc.Start(streamCtx, connect.NewRequest(startRequest(spec)))
	if err == nil {
		s.stream = stream
		err = s.receiveStart()
	}
	if err != nil {
		if s.stream != nil {
			_ = s.stream.Close()
		}
		s.stop()
		return nil, callError(ctx, err)
	}
	s.parent = ctx
	return s, nil
}

func execHeaders(token string, spec cube.ExecSpec) http.Header {
	h := http.Header{}
	if token != "" {
		h.Set(tokenHeader, token)
	}
	if spec.User != "" {
		h.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(spec.User+":")))
	}
	if spec.Timeout > 0 {
		h.Set(timeoutHeader, strconv.FormatInt(max(spec.Timeout.Milliseconds(), 1), 10))
	}
	return h
}

func startRequest(spec cube.ExecSpec) *processpb.StartRequest {
	req := &processpb.StartRequest{
		Process: &processpb.ProcessConfig{Envs: spec.Env},
		Stdin:   &spec.Stdin,
	}
	if len(spec.Args) > 0 {
		req.Process.Cmd, req.Process.Args = spec.Args[0], spec.Args[1:]
	}
	if spec.Cwd != "" {
		req.Process.Cwd = &spec.Cwd
	}
	if spec.TTY != nil {
		req.Pty = &processpb.PTY{Size: &processpb.PTY_Size{Cols: spec.TTY.Cols, Rows: spec.TTY.Rows}}
	}
	return req
}

// callError turns an error of a call into cube's.
func callError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return &cube.Error{Code: cube.CodeOf(ctx.Err()), Op: "exec", Err: errors.Join(ctx.Err(), err)}
	}
	var have *cube.Error
	if errors.As(err, &have) {
		return err
	}
	var ce *connect.Error
	if !errors.As(err, &ce) {
		return &cube.Error{Code: cube.CodeUnavailable, Op: "exec", Err: err}
	}
	text := clean(ce.Message())
	out := &cube.Error{Op: "exec", Err: errors.New(text)}
	switch ce.Code() {
	case connect.CodeInvalidArgument:
		out.Code = cube.CodeInvalid
	case connect.CodeUnauthenticated:
		out.Code = cube.CodePermissionDenied
		if strings.HasPrefix(text, "invalid username") {
			out.Code, out.Field = cube.CodeInvalid, "user"
		}
	case connect.CodeNotFound:
		out.Code = cube.CodeNotFound
	case connect.CodeUnimplemented:
		out.Code = cube.CodeUnimplemented
	case connect.CodeResourceExhausted:
		out.Code = cube.CodeResourceExhausted
	case connect.CodeUnavailable, connect.CodeCanceled, connect.CodeUnknown:
		out.Code = cube.CodeUnavailable
	default:
		out.Code = cube.CodeInternal
	}
	return out
}

// session implements cube.ExecSession.
type session struct {
	ctx       context.Context // ends with the session
	parent    context.Context // the caller's
	stop      func()
	pc        processconnect.ProcessClient
	transport *http.Transport
	token     string
	tty       bool
	pid       uint32

	stream *connect.ServerStreamForClient[processpb.StartResponse]
	begun  bool // the PID was handed out
	ended  bool // the exit was handed out
}

func (s *session) receiveStart() error {
	if !s.stream.Receive() {
		return streamEnd(s.stream.Err())
	}
	start, ok := s.stream.Msg().GetEvent().GetEvent().(*processpb.ProcessEvent_Start)
	if !ok || start.Start.GetPid() == 0 {
		return cube.Errorf(cube.CodeInternal, "the guest agent did not begin with the program's PID")
	}
	s.pid = start.Start.GetPid()
	return nil
}

// streamEnd is the error of a stream that ended without the event that was due.
func streamEnd(err error) error {
	if err == nil {
		return cube.Errorf(cube.CodeUnavailable, "the guest agent ended the call early")
	}
	return err
}

// Recv implements cube.ExecSession.
func (s *session) Recv() (cube.ExecEvent, error) {
	switch {
	case s.ended:
		return cube.ExecEvent{}, io.EOF
	case !s.begun:
		s.begun = true
		return cube.ExecEvent{PID: s.pid}, nil
	}
	for s.stream.Receive() {
		ev, ok := event(s.stream.Msg().GetEvent())
		if !ok {
			continue
		}
		s.ended = ev.Exit != nil
		return ev, nil
	}
	return cube.ExecEvent{}, callError(s.parent, streamEnd(s.stream.Err()))
}

// event converts an event; a keepalive is none.
func event(ev *processpb.ProcessEvent) (cube.ExecEvent, bool) {
	switch v := ev.GetEvent().(type) {
	case *processpb.ProcessEvent_Data:
		switch out := v.Data.GetOutput().(type) {
		case *processpb.ProcessEvent_DataEvent_Stdout:
			return cube.ExecEvent{Stream: cube.StreamStdout, Data: out.Stdout}, true
		case *processpb.ProcessEvent_DataEvent_Stderr:
			return cube.ExecEvent{Stream: cube.StreamStderr, Data: out.Stderr}, true
		case *processpb.ProcessEvent_DataEvent_Pty:
			return cube.ExecEvent{Stream: cube.StreamTTY, Data: out.Pty}, true
		}
	case *processpb.ProcessEvent_End:
		return cube.ExecEvent{Exit: exitOf(v.End)}, true
	}
	return cube.ExecEvent{}, false
}

// SendStdin implements cube.ExecSession. It returns when the program took b.
func (s *session) SendStdin(b []byte) error {
	const piece = 256 << 10
	for len(b) > 0 {
		n := min(len(b), piece)
		in := &processpb.ProcessInput{Input: &processpb.ProcessInput_Stdin{Stdin: b[:n]}}
		if s.tty {
			in.Input = &processpb.ProcessInput_Pty{Pty: b[:n]}
		}
		_, err := s.pc.SendInput(s.ctx, connect.NewRequest(&processpb.SendInputRequest{Process: s.selector(), Input: in}))
		if err != nil {
			return callError(s.parent, err)
		}
		b = b[n:]
	}
	return nil
}

func (s *session) selector() *processpb.ProcessSelector {
	return &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Pid{Pid: s.pid}}
}

// CloseStdin implements cube.ExecSession. On a terminal it types an end-of-file.
func (s *session) CloseStdin() error {
	if s.tty {
		const endOfFile = 4
		return s.SendStdin([]byte{endOfFile})
	}
	if _, err := s.pc.CloseStdin(s.ctx, connect.NewRequest(&processpb.CloseStdinRequest{Process: s.selector()})); err != nil {
		return callError(s.parent, err)
	}
	return nil
}

// Signal implements cube.ExecSession.
func (s *session) Signal(sig int) error {
	body, err := json.Marshal(map[string]int{"pid": int(s.pid), "signal": sig})
	if err != nil {
		return err
	}
	return do(s.ctx, s.transport, request{method: http.MethodPost, path: "/signal", token: s.token, body: body})
}

// Resize implements cube.ExecSession.
func (s *session) Resize(ws cube.WindowSize) error {
	req := &processpb.UpdateRequest{Process: s.selector(), Pty: &processpb.PTY{Size: &processpb.PTY_Size{Cols: ws.Cols, Rows: ws.Rows}}}
	if _, err := s.pc.Update(s.ctx, connect.NewRequest(req)); err != nil {
		return callError(s.parent, err)
	}
	return nil
}

// Close implements cube.ExecSession.
func (s *session) Close() error {
	s.stop()
	_ = s.stream.Close() // it says that the call was cancelled, which it was
	s.transport.CloseIdleConnections()
	return nil
}
