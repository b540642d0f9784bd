package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	cube "github.com/cubesandbox/cubelet"
	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
	"github.com/cubesandbox/cubelet/api/cube/v1/cubev1connect"
	"github.com/cubesandbox/cubelet/internal/cubetest"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

type execClient struct {
	t      *testing.T
	stream *connect.BidiStreamForClient[cubev1.ExecSandboxRequest, cubev1.ExecSandboxResponse]
}

func (r *rig) exec(t *testing.T, ctx context.Context, first *cubev1.ExecSandboxRequest) *execClient {
	t.Helper()
	c := &execClient{t, r.sandboxes.ExecSandbox(ctx)}
	if first != nil {
		c.send(first)
	}
	return c
}

func (c *execClient) send(m *cubev1.ExecSandboxRequest) {
	c.t.Helper()
	if err := c.stream.Send(m); err != nil {
		_, reason := c.stream.Receive()
		c.t.Fatalf("send: %v (%v)", err, reason)
	}
}

func stdin(b []byte) *cubev1.ExecSandboxRequest {
	return &cubev1.ExecSandboxRequest{Request: &cubev1.ExecSandboxRequest_Stdin{Stdin: b}}
}

func closeStdin() *cubev1.ExecSandboxRequest {
	return &cubev1.ExecSandboxRequest{Request: &cubev1.ExecSandboxRequest_CloseStdin{CloseStdin: &cubev1.ExecCloseStdin{}}}
}

func sig(n int32) *cubev1.ExecSandboxRequest {
	return &cubev1.ExecSandboxRequest{Request: &cubev1.ExecSandboxRequest_Signal{Signal: n}}
}

// finish reads to the end and returns output, bytes of standard input taken, and exit.
func (c *execClient) finish() (out string, taken uint64, exit *cubev1.ExecExited) {
	c.t.Helper()
	var b bytes.Buffer
	for {
		m, err := c.stream.Receive()
		if errors.Is(err, io.EOF) {
			if exit == nil {
				c.t.Fatal("the stream ended without exit")
			}
			return b.String(), taken, exit
		}
		if err != nil {
			c.t.Fatal(err)
		}
		if exit != nil {
			c.t.Fatalf("%v after the exit", m)
		}
		b.Write(m.GetStdout())
		b.Write(m.GetStderr())
		b.Write(m.GetTty())
		if n := m.GetStdinTaken(); n > 0 {
			taken = n
		}
		exit = m.GetExited()
	}
}

// until reads until the output contains text.
func (c *execClient) until(text string) {
	c.t.Helper()
	var out string
	for !strings.Contains(out, text) {
		m, err := c.stream.Receive()
		if err != nil {
			c.t.Fatalf("no %q in %q: %v", text, out, err)
		}
		out += string(m.GetStdout()) + string(m.GetTty())
	}
}

func (c *execClient) fails(code connect.Code, field string) {
	c.t.Helper()
	for {
		_, err := c.stream.Receive()
		if err == nil {
			continue
		}
		if connect.CodeOf(err) != code || field != "" && detailOf(err).GetField() != field {
			c.t.Fatalf("want %v at %q, have %v", code, field, err)
		}
		return
	}
}

func withStdin(id string, args ...string) *cubev1.ExecSandboxRequest {
	m := startOf(id, args...)
	m.GetStart().Stdin = true
	return m
}

func TestExecRefusesMalformedConversations(t *testing.T) {
	r := newRig(t)
	id := r.create(t, &cubev1.CreateSandboxRequest{}).GetId()
	first := map[string]*cubev1.ExecSandboxRequest{
		"start":             stdin([]byte("x")),
		"start.sandbox_id":  startOf(""),
		"start.args[0]":     startOf(id, ""),
		"start.args[1]":     startOf(id, "echo", "a\x00b"),
		"start.tty.cols":    {Request: &cubev1.ExecSandboxRequest_Start{Start: &cubev1.ExecStart{SandboxId: id, Tty: &cubev1.WindowSize{Rows: 1}}}},
		"start.tty.rows":    {Request: &cubev1.ExecSandboxRequest_Start{Start: &cubev1.ExecStart{SandboxId: id, Tty: &cubev1.WindowSize{Cols: 1, Rows: 1 << 20}}}},
		"start.args":        startOf(id, "/no/such/program"),
		"start.cwd":         {Request: &cubev1.ExecSandboxRequest_Start{Start: &cubev1.ExecStart{SandboxId: id, Cwd: "\x00"}}},
		`start.env["A"]`:    {Request: &cubev1.ExecSandboxRequest_Start{Start: &cubev1.ExecStart{SandboxId: id, Env: map[string]string{"A": "\x00"}}}},
		"start.sandbox_id ": startOf(strings.Repeat("x", 300)),
	}
	for field, m := range first {
		t.Run(field, func(t *testing.T) {
			r.exec(t, t.Context(), m).fails(connect.CodeInvalidArgument, strings.TrimSpace(field))
		})
	}
	t.Run("no message", func(t *testing.T) {
		c := r.exec(t, t.Context(), nil)
		if err := c.stream.CloseRequest(); err != nil {
			t.Fatal(err)
		}
		c.fails(connect.CodeInvalidArgument, "start")
	})
	later := map[string]*cubev1.ExecSandboxRequest{
		"start": startOf(id, "echo"), "request": {}, "signal": sig(65), "stdin": stdin([]byte("x")),
		"resize.cols": {Request: &cubev1.ExecSandboxRequest_Resize{Resize: &cubev1.WindowSize{}}},
	}
	for field, m := range later {
		t.Run("later "+field, func(t *testing.T) {
			c := r.exec(t, t.Context(), startOf(id, "sleep", "60"))
			c.send(m)
			c.fails(connect.CodeInvalidArgument, field)
		})
	}
	t.Run("unknown sandbox", func(t *testing.T) {
		r.exec(t, t.Context(), startOf("nope", "true")).fails(connect.CodeNotFound, "")
	})
}

func TestExecDeliversInputInOrderAndAcknowledgesIt(t *testing.T) {
	r := newRig(t)
	id := r.create(t, &cubev1.CreateSandboxRequest{}).GetId()
	c := r.exec(t, t.Context(), withStdin(id, "cat"))
	var sent bytes.Buffer
	go func() {
		for i := range 2000 {
			chunk := fmt.Appendf(nil, "line %d %s\n", i, strings.Repeat("x", 500))
			sent.Write(chunk)
			_ = c.stream.Send(stdin(chunk)) // a failure shows in the output
		}
		_ = c.stream.Send(closeStdin())
	}()
	out, taken, exit := c.finish()
	if out != sent.String() || taken != uint64(sent.Len()) || exit.GetExitCode() != 0 {
		t.Errorf("sent %d bytes, taken %d, back %d, exit %v", sent.Len(), taken, len(out), exit)
	}
}

func TestClosingTheRequestEndsStandardInput(t *testing.T) {
	r := newRig(t)
	id := r.create(t, &cubev1.CreateSandboxRequest{}).GetId()
	c := r.exec(t, t.Context(), withStdin(id, "cat"))
	c.send(stdin([]byte("all")))
	if err := c.stream.CloseRequest(); err != nil {
		t.Fatal(err)
	}
	if out, _, _ := c.finish(); out != "all" {
		t.Errorf("output %q", out)
	}
}

func TestProgramThatReadsNoInput(t *testing.T) {
	r := newRig(t)
	id := r.create(t, &cubev1.CreateSandboxRequest{}).GetId()
	const script = `trap 'echo got it; exit 9' TERM; echo ready; while :; do sleep 0.05; done`
	c := r.exec(t, t.Context(), withStdin(id, "sh", "-c", script))
	c.until("ready")
	t.Run("holds back a client that sends without end", func(t *testing.T) {
		// What fits: the pipe, the server's queue, and the windows of HTTP/2.
		sent := make(chan int, 1)
		go func() {
			n := 0
			for ; n < 64<<20; n += 32 << 10 {
				if c.stream.Send(stdin(make([]byte, 32<<10))) != nil {
					break
				}
			}
			sent <- n
		}()
		select {
		case n := <-sent:
			t.Fatalf("%d bytes were taken", n)
		case <-time.After(300 * time.Millisecond):
		}
	})
	t.Run("ends by a signal although its input is full", func(t *testing.T) {
		d := r.exec(t, t.Context(), withStdin(id, "sh", "-c", script))
		d.until("ready")
		for range (256 << 10) / (32 << 10) {
			d.send(stdin(make([]byte, 32<<10)))
		}
		d.send(sig(15))
		if out, _, exit := d.finish(); !strings.Contains(out, "got it") || exit.GetExitCode() != 9 {
			t.Errorf("output %q, exit %v", out, exit)
		}
	})
}

func TestProgramThatStopsReadingEndsNormally(t *testing.T) {
	r := newRig(t)
	id := r.create(t, &cubev1.CreateSandboxRequest{}).GetId()
	c := r.exec(t, t.Context(), withStdin(id, "sh", "-c", "head -n 1; exec <&-; sleep 0.2; exit 5"))
	go func() {
		for range 100 {
			if c.stream.Send(stdin([]byte(strings.Repeat("y\n", 10_000)))) != nil {
				return
			}
		}
	}()
	if out, _, exit := c.finish(); out != "y\n" || exit.GetExitCode() != 5 {
		t.Errorf("output %q, exit %v", out, exit)
	}
}

func TestTerminalIsResized(t *testing.T) {
	r := newRig(t)
	id := r.create(t, &cubev1.CreateSandboxRequest{}).GetId()
	m := withStdin(id, "sh", "-c", "stty -echo; stty size; read x; stty size; exit 3")
	m.GetStart().Tty = &cubev1.WindowSize{Cols: 100, Rows: 30}
	c := r.exec(t, t.Context(), m)
	c.until("30 100")
	c.send(&cubev1.ExecSandboxRequest{Request: &cubev1.ExecSandboxRequest_Resize{Resize: &cubev1.WindowSize{Cols: 120, Rows: 40}}})
	c.send(stdin([]byte("\n")))
	if out, _, exit := c.finish(); !strings.Contains(out, "40 120") || exit.GetExitCode() != 3 {
		t.Errorf("output %q, exit %v", out, exit)
	}
}

func TestSignalThatKillsIsReported(t *testing.T) {
	r := newRig(t)
	id := r.create(t, &cubev1.CreateSandboxRequest{}).GetId()
	c := r.exec(t, t.Context(), startOf(id, "sh", "-c", "echo ready; exec sleep 60"))
	c.until("ready")
	c.send(sig(9))
	if _, _, exit := c.finish(); exit.GetExitCode() != 137 || exit.GetSignal() != "SIGKILL" {
		t.Errorf("exit %v", exit)
	}
}

func TestProgramLivesOnWhenItsClientGoes(t *testing.T) {
	r := newRig(t)
	id := r.create(t, &cubev1.CreateSandboxRequest{}).GetId()
	ctx, cancel := context.WithCancel(t.Context())
	c := r.exec(t, ctx, withStdin(id, "sh", "-c", "echo ready; while test ! -e stop; do sleep 0.05; done; touch done"))
	c.until("ready")
	cancel()
	c.fails(connect.CodeCanceled, "")
	second := r.exec(t, t.Context(), startOf(id, "touch", "stop"))
	second.finish()
	testenv.Eventually(t, 10*time.Second, func() error {
		d := r.exec(t, t.Context(), startOf(id, "test", "-e", "done"))
		if _, _, exit := d.finish(); exit.GetExitCode() != 0 {
			return errors.New("the program did not go on")
		}
		return nil
	})
}

func TestExecNeedsHTTP2(t *testing.T) {
	r := newRig(t)
	res, err := r.http1.Post(base+"/cube.v1.SandboxService/ExecSandbox", "application/connect+json", strings.NewReader(""))
	if err != nil {
		t.Fatal(err)
	}
	_ = res.Body.Close()
	if res.StatusCode != 505 {
		t.Errorf("status %s", res.Status)
	}
}

// silent is a node whose sessions end without an exit.
type silent struct{ cube.Sandboxes }

func (silent) Exec(context.Context, string, cube.ExecSpec) (cube.ExecSession, error) {
	return silentSession{}, nil
}

type silentSession struct{ cube.ExecSession }

func (silentSession) Recv() (cube.ExecEvent, error) { return cube.ExecEvent{}, io.EOF }
func (silentSession) Close() error                  { return nil }

func TestSessionThatEndsWithoutAnExitIsAnError(t *testing.T) {
	n := cubetest.New(t)
	srv := httptest.NewUnstartedServer(New(Config{Sandboxes: silent{n.Sandboxes()}, Templates: n.Templates(), Node: n.Node(), Log: quiet()}))
	srv.EnableHTTP2 = true
	srv.StartTLS()
	defer srv.Close()
	c := &execClient{t, cubev1connect.NewSandboxServiceClient(srv.Client(), srv.URL).ExecSandbox(t.Context())}
	c.send(startOf("s1", "true"))
	c.fails(connect.CodeUnavailable, "")
}
