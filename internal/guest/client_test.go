package guest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/agent"
	"github.com/cubesandbox/cubelet/internal/agent/wire"
	"github.com/cubesandbox/cubelet/internal/guestapi"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newClient() *Client { return New(slog.New(slog.DiscardHandler)) }

// serveAgent runs an agent on this machine.
func serveAgent(t *testing.T) guestapi.Dialer {
	t.Helper()
	testenv.RequireRoot(t)
	s, err := agent.New(agent.Config{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-served, s.Close()); err != nil {
			t.Error(err)
		}
	})
	return dialTo(l.Addr().String())
}

func dialTo(addr string) guestapi.Dialer {
	return func(ctx context.Context, _ int) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", addr)
	}
}

func timeout(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func sh(script string) cube.ExecSpec {
	return cube.ExecSpec{Args: []string{"/bin/sh", "-c", script}}
}

func TestRunReturnsOutputsAndExitCode(t *testing.T) {
	dial, c, ctx := serveAgent(t), newClient(), timeout(t)
	in := guestapi.Init{SandboxID: "sb", AccessToken: "tok", Env: map[string]string{"A": "b"}, User: "nobody", Workdir: "/tmp", Entrypoint: []string{"/bin/sh", "-c"}, Cmd: []string{"echo image"}}
	if err := c.Init(ctx, dial, in); err != nil {
		t.Fatal(err)
	}
	out, errOut, code, err := c.Run(ctx, dial, "tok", sh("echo $A $(id -un) $(pwd); echo err >&2; exit 3"))
	if err != nil || string(out) != "b nobody /tmp\n" || string(errOut) != "err\n" || code != 3 {
		t.Errorf("%q %q %d %v", out, errOut, code, err)
	}
	if out, _, _, err = c.Run(ctx, dial, "tok", cube.ExecSpec{}); err != nil || string(out) != "image\n" {
		t.Errorf("the image's command: %q %v", out, err)
	}
	if out, _, _, err = c.Run(ctx, dial, "tok", sh("head -c 5000000 /dev/zero; echo end")); err != nil || len(out) != maxOutput || !bytes.HasSuffix(out, []byte("end\n")) {
		t.Errorf("the tail has %d bytes, %v", len(out), err)
	}
}

func TestErrorsHaveCodes(t *testing.T) {
	dial, c, ctx := serveAgent(t), newClient(), timeout(t)
	if err := c.Init(ctx, dial, guestapi.Init{AccessToken: "tok"}); err != nil {
		t.Fatal(err)
	}
	for name, x := range map[string]struct {
		token string
		spec  cube.ExecSpec
		code  cube.Code
	}{
		"token":   {"other", sh("true"), cube.CodePermissionDenied},
		"user":    {"tok", cube.ExecSpec{Args: []string{"true"}, User: "no-one"}, cube.CodeInvalid},
		"cwd":     {"tok", cube.ExecSpec{Args: []string{"true"}, Cwd: "/none"}, cube.CodeInvalid},
		"program": {"tok", cube.ExecSpec{Args: []string{"/none"}}, cube.CodeInvalid},
		"nothing": {"tok", cube.ExecSpec{}, cube.CodeInvalid},
		"size":    {"tok", cube.ExecSpec{Args: []string{strings.Repeat("x", wire.MaxRequest)}}, cube.CodeInvalid},
	} {
		_, err := c.Exec(ctx, dial, x.token, x.spec)
		if err == nil || cube.CodeOf(err) != x.code {
			t.Errorf("%s: %v (%v), want %v", name, err, cube.CodeOf(err), x.code)
		}
	}
	if err := c.Init(ctx, dial, guestapi.Init{AccessToken: "other"}); cube.CodeOf(err) != cube.CodePermissionDenied {
		t.Errorf("init with another token: %v", err)
	}
	if err := c.Health(ctx, dial); err != nil {
		t.Error(err)
	}
	if err := c.Shutdown(ctx, dial, "tok"); cube.CodeOf(err) != cube.CodeUnimplemented {
		t.Errorf("shutdown without a machine: %v", err)
	}
}

// next returns the next event of an open session.
func next(t *testing.T, s cube.ExecSession) cube.ExecEvent {
	t.Helper()
	ev, err := s.Recv()
	if err != nil {
		t.Fatal(err)
	}
	return ev
}

// finish collects the output and the end.
func finish(t *testing.T, s cube.ExecSession) (string, *cube.ExecExit) {
	t.Helper()
	var out []byte
	for {
		ev := next(t, s)
		out = append(out, ev.Data...)
		if ev.Exit != nil {
			if _, err := s.Recv(); !errors.Is(err, io.EOF) {
				t.Errorf("after the exit: %v", err)
			}
			return string(out), ev.Exit
		}
	}
}

func begin(t *testing.T, spec cube.ExecSpec, dial guestapi.Dialer) cube.ExecSession {
	t.Helper()
	s, err := newClient().Exec(timeout(t), dial, "", spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	if ev := next(t, s); ev.PID == 0 {
		t.Fatalf("first event %+v", ev)
	}
	return s
}

func TestLargeInputArrivesWholeAndEnds(t *testing.T) {
	dial := serveAgent(t)
	spec := sh("sha256sum")
	spec.Stdin = true
	s := begin(t, spec, dial)
	input := bytes.Repeat([]byte("0123456789abcdef"), 400000)
	if err := errors.Join(s.SendStdin(input), s.CloseStdin()); err != nil {
		t.Fatal(err)
	}
	out, exit := finish(t, s)
	if want := sha256.Sum256(input); !strings.HasPrefix(out, hexOf(want[:])) || exit.Code != 0 {
		t.Errorf("%q %+v", out, exit)
	}
}

func hexOf(b []byte) string {
	const digits = "0123456789abcdef"
	var s []byte
	for _, c := range b {
		s = append(s, digits[c>>4], digits[c&15])
	}
	return string(s)
}

// A program that reads nothing holds up its input, but neither signals nor the end.
func TestSignalsPassInputThatNobodyReads(t *testing.T) {
	dial := serveAgent(t)
	spec := sh("trap 'exit 9' INT; echo ready; while :; do sleep 0.05; done")
	spec.Stdin = true
	s := begin(t, spec, dial)
	if ev := next(t, s); string(ev.Data) != "ready\n" {
		t.Fatalf("%+v", ev)
	}
	sent := make(chan error, 1)
	go func() { sent <- s.SendStdin(make([]byte, 4*wire.Window)) }()
	if err := s.Signal(2); err != nil {
		t.Fatal(err)
	}
	if _, exit := finish(t, s); exit.Code != 9 {
		t.Errorf("%+v", exit)
	}
	// What the program did not take when it ended is dropped, or refused.
	if err := <-sent; err != nil && cube.CodeOf(err) != cube.CodeNotFound {
		t.Errorf("input to a program that has ended: %v", err)
	}
	if err := s.Signal(2); cube.CodeOf(err) != cube.CodeNotFound {
		t.Errorf("signal to a program that has ended: %v", err)
	}
}

func TestEndsAreDescribed(t *testing.T) {
	dial := serveAgent(t)
	for script, want := range map[string]cube.ExecExit{
		"exit 4":          {Code: 4, Status: "exit status 4"},
		"kill -TERM $$":   {Code: 143, Signal: "SIGTERM", Status: "signal: terminated"},
		"sleep 100 | cat": {Code: 137, Signal: "SIGKILL", Status: "signal: killed", Error: "deadline exceeded"},
	} {
		spec := sh(script)
		if strings.Contains(script, "sleep") {
			spec.Timeout = 200 * time.Millisecond
		}
		if _, exit := finish(t, begin(t, spec, dial)); *exit != want {
			t.Errorf("%s: %+v", script, *exit)
		}
	}
}

func TestTerminalsResizeAndTakeEndOfFile(t *testing.T) {
	dial := serveAgent(t)
	spec := sh("stty -echo; stty size; cat; stty size")
	spec.TTY = &cube.WindowSize{Cols: 80, Rows: 24}
	s := begin(t, spec, dial)
	if ev := next(t, s); ev.Stream != cube.StreamTTY || string(ev.Data) != "24 80\r\n" {
		t.Fatalf("%+v", ev)
	}
	if err := errors.Join(s.Resize(cube.WindowSize{Cols: 100, Rows: 50}), s.SendStdin([]byte("hi\n")), s.CloseStdin()); err != nil {
		t.Fatal(err)
	}
	if out, exit := finish(t, s); out != "hi\r\n50 100\r\n" || exit.Code != 0 {
		t.Errorf("%q %+v", out, exit)
	}
}

func TestProgramOutlivesItsSession(t *testing.T) {
	dial := serveAgent(t)
	file := t.TempDir() + "/done"
	s := begin(t, sh("sleep 0.3; echo x > "+file), dial)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Recv(); err == nil {
		t.Error("a closed session has events")
	}
	testenv.Eventually(t, 10*time.Second, func() error {
		_, _, code, err := newClient().Run(timeout(t), dial, "", sh("test -s "+file))
		if err == nil && code != 0 {
			err = errors.New("the program has not written")
		}
		return err
	})
}

func TestSessionEndsWithItsContext(t *testing.T) {
	dial := serveAgent(t)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	s, err := newClient().Exec(ctx, dial, "", sh("exec sleep 1000"))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	next(t, s)
	if _, err := s.Recv(); cube.CodeOf(err) != cube.CodeDeadlineExceeded {
		t.Errorf("%v", err)
	}
}

func TestTransportReachesFiles(t *testing.T) {
	dial := serveAgent(t)
	req, err := http.NewRequestWithContext(timeout(t), http.MethodGet, "http://any/files?path=/etc/passwd", nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := newClient().Transport(dial).RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if b, err := io.ReadAll(res.Body); err != nil || res.StatusCode != 200 || !bytes.Contains(b, []byte("root:")) {
		t.Errorf("%d %q %v", res.StatusCode, b, err)
	}
}

func TestInitWaitsForAGuestThatWakesUp(t *testing.T) {
	dial := serveAgent(t)
	attempts := 0
	late := func(ctx context.Context, port int) (net.Conn, error) {
		if attempts++; attempts < 4 {
			return nil, errors.New("no route to host")
		}
		return dial(ctx, port)
	}
	if err := newClient().Init(timeout(t), late, guestapi.Init{}); err != nil || attempts != 4 {
		t.Errorf("%d attempts, %v", attempts, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	never := func(context.Context, int) (net.Conn, error) { return nil, errors.New("no route to host") }
	err := newClient().Init(ctx, never, guestapi.Init{})
	if cube.CodeOf(err) != cube.CodeDeadlineExceeded || !strings.Contains(err.Error(), "no route to host") {
		t.Errorf("%v", err)
	}
}
