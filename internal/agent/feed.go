package agent

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"connectrpc.com/connect"

	processpb "github.com/cubesandbox/cubelet/api/envd/process"
)

// TimeoutHeader carries, in milliseconds, how long a program may run. Unlike
// Connect-Timeout-Ms it does not bound the call: the call reports how the program ended.
const TimeoutHeader = "X-Cube-Timeout-Ms"

func hostTimeout(h http.Header) (time.Time, error) {
	text := h.Get(TimeoutHeader)
	if text == "" {
		return time.Time{}, nil
	}
	ms, err := strconv.ParseInt(text, 10, 64)
	if err != nil || ms <= 0 || ms > int64(1<<62/time.Millisecond) {
		return time.Time{}, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%s: %q is not a number of milliseconds", TimeoutHeader, text))
	}
	return time.Now().Add(time.Duration(ms) * time.Millisecond), nil
}

const defaultKeepalive = 90 * time.Second

func keepaliveInterval(h http.Header) time.Duration {
	s, err := strconv.Atoi(h.Get("Keepalive-Ping-Interval"))
	if err != nil || s <= 0 {
		return defaultKeepalive
	}
	return time.Duration(s) * time.Second
}

// feed sends the events of a process to one client.
type feed struct {
	p         *process
	sub       *subscriber
	keepalive time.Duration
}

// run sends start, the output and end. When ctx ends first the process lives on, unless
// the deadline of ctx is its own.
func (f *feed) run(ctx context.Context, send func(*processpb.ProcessEvent) error) error {
	defer f.sub.leave()
	start := &processpb.ProcessEvent_StartEvent{Pid: uint32(f.p.pid)}
	if err := send(&processpb.ProcessEvent{Event: &processpb.ProcessEvent_Start{Start: start}}); err != nil {
		return err
	}
	idle := time.NewTimer(f.keepalive)
	defer idle.Stop()
	for {
		select {
		case <-ctx.Done():
			return f.cancelled(ctx)
		case <-idle.C:
			idle.Reset(f.keepalive)
			alive := &processpb.ProcessEvent_Keepalive{Keepalive: &processpb.ProcessEvent_KeepAlive{}}
			if err := send(&processpb.ProcessEvent{Event: alive}); err != nil {
				return err
			}
			continue
		case <-f.sub.ready:
		}
		chunks, end, cut := f.sub.take()
		for _, c := range chunks {
			if err := send(dataEvent(c)); err != nil {
				return err
			}
		}
		switch {
		case cut:
			return connect.NewError(connect.CodeResourceExhausted, errors.New("the client reads too slowly and lost output"))
		case end != nil:
			return send(endEvent(end))
		}
		idle.Reset(f.keepalive)
	}
}

func (f *feed) cancelled(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return connect.NewError(connect.CodeDeadlineExceeded, errors.New(reasonDeadline))
	}
	return ctx.Err()
}

func dataEvent(c chunk) *processpb.ProcessEvent {
	d := &processpb.ProcessEvent_DataEvent{}
	switch c.stream {
	case streamStdout:
		d.Output = &processpb.ProcessEvent_DataEvent_Stdout{Stdout: c.data}
	case streamStderr:
		d.Output = &processpb.ProcessEvent_DataEvent_Stderr{Stderr: c.data}
	case streamPTY:
		d.Output = &processpb.ProcessEvent_DataEvent_Pty{Pty: c.data}
	}
	return &processpb.ProcessEvent{Event: &processpb.ProcessEvent_Data{Data: d}}
}

// endEvent words the end as Go's os.ProcessState does, which E2B's clients expect.
func endEvent(e *exit) *processpb.ProcessEvent {
	ws := e.status
	end := &processpb.ProcessEvent_EndEvent{ExitCode: int32(ws.ExitStatus()), Exited: ws.Exited()}
	if ws.Exited() {
		end.Status = "exit status " + strconv.Itoa(ws.ExitStatus())
	} else {
		end.Status = "signal: " + ws.Signal().String()
	}
	if ws.CoreDump() {
		end.Status += " (core dumped)"
	}
	if e.reason != "" {
		end.Error = &e.reason
	} else if ws.ExitStatus() != 0 {
		end.Error = &end.Status
	}
	return &processpb.ProcessEvent{Event: &processpb.ProcessEvent_End{End: end}}
}
