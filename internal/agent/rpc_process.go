package agent

import (
	"context"
	"encoding/base64"
	"errors"
	"net/http"
	"strings"
	"syscall"

	"connectrpc.com/connect"

	processpb "github.com/cubesandbox/cubelet/api/envd/process"
)

// processService implements process.Process.
type processService struct{ s *Server }

func errNotFound() error {
	return connect.NewError(connect.CodeNotFound, errors.New("process not found"))
}

// requestUser returns the user name of E2B's Basic authorization, empty when there is none.
func requestUser(h http.Header) string {
	basic, ok := strings.CutPrefix(h.Get("Authorization"), "Basic ")
	if !ok {
		return ""
	}
	b, err := base64.StdEncoding.DecodeString(basic)
	if err != nil {
		return ""
	}
	name := string(b)
	if i := strings.LastIndexByte(name, ':'); i >= 0 {
		name = name[:i]
	}
	return name
}

func (ps *processService) selected(sel *processpb.ProcessSelector) (*process, error) {
	var match func(*process) bool
	switch v := sel.GetSelector().(type) {
	case *processpb.ProcessSelector_Pid:
		match = func(p *process) bool { return uint32(p.pid) == v.Pid }
	case *processpb.ProcessSelector_Tag:
		match = func(p *process) bool { return p.spec.tag != nil && *p.spec.tag == v.Tag }
	default:
		return nil, connect.NewError(connect.CodeUnimplemented, errors.New("the selector is empty"))
	}
	if p := ps.s.procs.find(match); p != nil {
		return p, nil
	}
	return nil, errNotFound()
}

// alive is selected for calls that make no sense once the process has ended.
func (ps *processService) alive(sel *processpb.ProcessSelector) (*process, error) {
	p, err := ps.selected(sel)
	if err == nil && p.hub.ended() != nil {
		return nil, errNotFound()
	}
	return p, err
}

// List implements process.Process.
func (ps *processService) List(context.Context, *connect.Request[processpb.ListRequest]) (*connect.Response[processpb.ListResponse], error) {
	res := &processpb.ListResponse{}
	for _, p := range ps.s.procs.running() {
		res.Processes = append(res.Processes, &processpb.ProcessInfo{
			Config: &processpb.ProcessConfig{Cmd: p.spec.cmd, Args: p.spec.args, Envs: p.spec.envs, Cwd: p.spec.cwd},
			Pid:    uint32(p.pid),
			Tag:    p.spec.tag,
		})
	}
	return connect.NewResponse(res), nil
}

// Start implements process.Process.
func (ps *processService) Start(ctx context.Context, req *connect.Request[processpb.StartRequest], st *connect.ServerStream[processpb.StartResponse]) error {
	spec, err := newStartSpec(ctx, req.Msg, req.Header())
	if err != nil {
		return err
	}
	p, sub, err := ps.s.start(spec)
	if err != nil {
		return err
	}
	f := &feed{p: p, sub: sub, keepalive: keepaliveInterval(req.Header())}
	return f.run(ctx, func(ev *processpb.ProcessEvent) error {
		return st.Send(&processpb.StartResponse{Event: ev})
	})
}

func newStartSpec(ctx context.Context, m *processpb.StartRequest, h http.Header) (startSpec, error) {
	c := m.GetProcess()
	spec := startSpec{
		cmd: c.GetCmd(), args: c.GetArgs(), envs: c.GetEnvs(), tag: m.Tag,
		stdin: m.Stdin == nil || *m.Stdin,
		user:  requestUser(h),
	}
	if c != nil {
		spec.cwd = c.Cwd
	}
	if m.Pty != nil {
		spec.pty = &ptySize{m.Pty.GetSize().GetCols(), m.Pty.GetSize().GetRows()}
	}
	for _, arg := range append([]string{spec.cmd}, spec.args...) {
		if strings.ContainsRune(arg, 0) {
			return spec, connect.NewError(connect.CodeInvalidArgument, errors.New("an argument contains a NUL byte"))
		}
	}
	spec.expires, _ = ctx.Deadline()
	if t, err := hostTimeout(h); err != nil {
		return spec, err
	} else if !t.IsZero() {
		spec.expires = t
	}
	return spec, nil
}

// Connect implements process.Process.
func (ps *processService) Connect(ctx context.Context, req *connect.Request[processpb.ConnectRequest], st *connect.ServerStream[processpb.ConnectResponse]) error {
	p, err := ps.selected(req.Msg.GetProcess())
	if err != nil {
		return err
	}
	f := &feed{p: p, sub: p.hub.subscribe(), keepalive: keepaliveInterval(req.Header())}
	return f.run(ctx, func(ev *processpb.ProcessEvent) error {
		return st.Send(&processpb.ConnectResponse{Event: ev})
	})
}

// Update implements process.Process.
func (ps *processService) Update(_ context.Context, req *connect.Request[processpb.UpdateRequest]) (*connect.Response[processpb.UpdateResponse], error) {
	p, err := ps.alive(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	if size := req.Msg.GetPty().GetSize(); size != nil {
		if err := p.resize(size.GetCols(), size.GetRows()); err != nil {
			return nil, connect.NewError(connect.CodeInternal, err)
		}
	}
	return connect.NewResponse(&processpb.UpdateResponse{}), nil
}

// SendInput implements process.Process.
func (ps *processService) SendInput(ctx context.Context, req *connect.Request[processpb.SendInputRequest]) (*connect.Response[processpb.SendInputResponse], error) {
	p, err := ps.alive(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	if err := sendInput(ctx, p, req.Msg.GetInput()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&processpb.SendInputResponse{}), nil
}

func sendInput(ctx context.Context, p *process, in *processpb.ProcessInput) error {
	var err error
	switch v := in.GetInput().(type) {
	case *processpb.ProcessInput_Stdin:
		err = p.write(ctx, v.Stdin, false)
	case *processpb.ProcessInput_Pty:
		err = p.write(ctx, v.Pty, true)
	default:
		return connect.NewError(connect.CodeUnimplemented, errors.New("the input is empty"))
	}
	if err != nil {
		return connect.NewError(connect.CodeInternal, err)
	}
	return nil
}

// StreamInput implements process.Process.
func (ps *processService) StreamInput(ctx context.Context, st *connect.ClientStream[processpb.StreamInputRequest]) (*connect.Response[processpb.StreamInputResponse], error) {
	var p *process
	for st.Receive() {
		switch v := st.Msg().GetEvent().(type) {
		case *processpb.StreamInputRequest_Start:
			var err error
			if p, err = ps.alive(v.Start.GetProcess()); err != nil {
				return nil, err
			}
		case *processpb.StreamInputRequest_Data:
			if p == nil {
				return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("the first message must be start"))
			}
			if err := sendInput(ctx, p, v.Data.GetInput()); err != nil {
				return nil, err
			}
		case *processpb.StreamInputRequest_Keepalive:
		default:
			return nil, connect.NewError(connect.CodeUnimplemented, errors.New("the event is empty"))
		}
	}
	if err := st.Err(); err != nil {
		return nil, err
	}
	return connect.NewResponse(&processpb.StreamInputResponse{}), nil
}

// SendSignal implements process.Process.
func (ps *processService) SendSignal(_ context.Context, req *connect.Request[processpb.SendSignalRequest]) (*connect.Response[processpb.SendSignalResponse], error) {
	p, err := ps.alive(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	switch sig := req.Msg.GetSignal(); sig {
	case processpb.Signal_SIGNAL_SIGKILL, processpb.Signal_SIGNAL_SIGTERM:
		err = p.signal(syscall.Signal(sig))
	default:
		return nil, connect.NewError(connect.CodeUnimplemented, errors.New("invalid signal: "+sig.String()))
	}
	switch {
	case errors.Is(err, syscall.ESRCH):
		return nil, errNotFound()
	case err != nil:
		return nil, connect.NewError(connect.CodeInternal, err)
	}
	return connect.NewResponse(&processpb.SendSignalResponse{}), nil
}

// CloseStdin implements process.Process.
func (ps *processService) CloseStdin(_ context.Context, req *connect.Request[processpb.CloseStdinRequest]) (*connect.Response[processpb.CloseStdinResponse], error) {
	p, err := ps.alive(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	if err := p.closeStdin(); err != nil {
		return nil, connect.NewError(connect.CodeInternal, err)
	}
	return connect.NewResponse(&processpb.CloseStdinResponse{}), nil
}
