package agent

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	processpb "github.com/cubesandbox/cubelet/api/envd/process"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

// shell is a request for a program of sh; stdin is not connected.
func shell(script string) *processpb.StartRequest {
	off := false
	return &processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", script}}, Stdin: &off}
}

// result is what a stream of events told.
type result struct {
	pid         uint32
	out, errOut string
	pty         string
	end         *processpb.ProcessEvent_EndEvent
}

func (r *result) add(ev *processpb.ProcessEvent) {
	switch v := ev.GetEvent().(type) {
	case *processpb.ProcessEvent_Start:
		r.pid = v.Start.GetPid()
	case *processpb.ProcessEvent_Data:
		r.out += string(v.Data.GetStdout())
		r.errOut += string(v.Data.GetStderr())
		r.pty += string(v.Data.GetPty())
	case *processpb.ProcessEvent_End:
		r.end = v.End
	}
}

func (f *fixture) run(t *testing.T, req *connect.Request[processpb.StartRequest]) (result, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	req.Header().Set("Keepalive-Ping-Interval", "50")
	var r result
	// A deadline of the call would be the process's; the test's own is not sent.
	st, err := f.proc.Start(context.WithoutCancel(ctx), req)
	if err != nil {
		return r, err
	}
	defer st.Close()
	for st.Receive() {
		r.add(st.Msg().GetEvent())
	}
	return r, st.Err()
}

// begin starts a program and returns its PID and its stream after the start event.
func (f *fixture) begin(t *testing.T, ctx context.Context, req *processpb.StartRequest) (uint32, *connect.ServerStreamForClient[processpb.StartResponse]) {
	t.Helper()
	st, err := f.proc.Start(ctx, connect.NewRequest(req))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	if !st.Receive() {
		t.Fatalf("no start event: %v", st.Err())
	}
	return st.Msg().GetEvent().GetStart().GetPid(), st
}

func byPID(pid uint32) *processpb.ProcessSelector {
	return &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Pid{Pid: pid}}
}

func TestOutputAndExitStatusArriveInE2BsForm(t *testing.T) {
	f := newFixture(t, Config{})
	r, err := f.run(t, connect.NewRequest(shell("echo out; echo err >&2; exit 3")))
	if err != nil {
		t.Fatal(err)
	}
	if r.pid == 0 || r.out != "out\n" || r.errOut != "err\n" {
		t.Errorf("got %+v", r)
	}
	if r.end.GetExitCode() != 3 || !r.end.GetExited() || r.end.GetStatus() != "exit status 3" || r.end.GetError() != "exit status 3" {
		t.Errorf("end %v", r.end)
	}
	r, err = f.run(t, connect.NewRequest(shell("kill -9 $$")))
	if err != nil || r.end.GetExitCode() != -1 || r.end.GetExited() || r.end.GetStatus() != "signal: killed" {
		t.Errorf("end %v, %v", r.end, err)
	}
	r, err = f.run(t, connect.NewRequest(shell("true")))
	if err != nil || r.end.Error != nil || r.end.GetStatus() != "exit status 0" {
		t.Errorf("end %v, %v", r.end, err)
	}
}

// The bytes that E2B's JavaScript SDK sends and expects.
func TestStreamsSpeakConnectJSON(t *testing.T) {
	f := newFixture(t, Config{})
	body := `{"process":{"cmd":"/bin/sh","args":["-c","printf hi; exit 1"],"envs":{}},"stdin":false}`
	var env bytes.Buffer
	env.WriteByte(0)
	_ = binary.Write(&env, binary.BigEndian, uint32(len(body)))
	env.WriteString(body)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.url+"/process.Process/Start", &env)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/connect+json")
	req.Header.Set("Connect-Protocol-Version", "1")
	req.Header.Set("Connect-Timeout-Ms", "60000")
	res, err := f.http.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if ct := res.Header.Get("Content-Type"); ct != "application/connect+json" {
		t.Errorf("content type %q", ct)
	}
	var got []string
	for {
		var head [5]byte
		if _, err := io.ReadFull(res.Body, head[:]); err != nil {
			break
		}
		msg := make([]byte, binary.BigEndian.Uint32(head[1:]))
		if _, err := io.ReadFull(res.Body, msg); err != nil {
			t.Fatal(err)
		}
		var compact bytes.Buffer
		if err := json.Compact(&compact, msg); err != nil {
			t.Fatalf("%q: %v", msg, err)
		}
		got = append(got, fmt.Sprintf("%d %s", head[0], &compact))
	}
	want := []string{
		`0 {"event":{"start":{"pid":`,
		`0 {"event":{"data":{"stdout":"` + base64.StdEncoding.EncodeToString([]byte("hi")) + `"}}}`,
		`0 {"event":{"end":{"exitCode":1,"exited":true,"status":"exit status 1","error":"exit status 1"}}}`,
		`2 {}`,
	}
	if len(got) != len(want) {
		t.Fatalf("got %q", got)
	}
	for i, w := range want {
		if !strings.HasPrefix(got[i], w) {
			t.Errorf("message %d is %s, want %s", i, got[i], w)
		}
	}
}

func TestMistakesHaveE2BsCodes(t *testing.T) {
	f := newFixture(t, Config{})
	ctx := t.Context()
	start := func(user string, m *processpb.StartRequest) error {
		_, err := f.run(t, as(user, m))
		return err
	}
	missing := "/no/such/directory"
	noDir := shell("true")
	noDir.Process.Cwd = &missing
	err := start("nobody-here", shell("true"))
	wantCode(t, "unknown user", err, connect.CodeUnauthenticated)
	if err == nil || !strings.Contains(err.Error(), "invalid username: 'nobody-here'") {
		t.Errorf("unknown user: %v", err)
	}
	wantCode(t, "cwd", start("", noDir), connect.CodeInvalidArgument)
	wantCode(t, "program", start("", &processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "no-such-program"}}), connect.CodeInvalidArgument)
	wantCode(t, "no program", start("", &processpb.StartRequest{}), connect.CodeInvalidArgument)

	unknown := byPID(1 << 30)
	_, err = f.proc.SendSignal(ctx, connect.NewRequest(&processpb.SendSignalRequest{Process: unknown, Signal: processpb.Signal_SIGNAL_SIGKILL}))
	wantCode(t, "unknown pid", err, connect.CodeNotFound)
	tag := &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Tag{Tag: "none"}}
	_, err = f.proc.CloseStdin(ctx, connect.NewRequest(&processpb.CloseStdinRequest{Process: tag}))
	wantCode(t, "unknown tag", err, connect.CodeNotFound)
	_, err = f.proc.Update(ctx, connect.NewRequest(&processpb.UpdateRequest{}))
	wantCode(t, "empty selector", err, connect.CodeUnimplemented)

	pid, _ := f.begin(t, ctx, shell("sleep 60"))
	_, err = f.proc.SendSignal(ctx, connect.NewRequest(&processpb.SendSignalRequest{Process: byPID(pid), Signal: 2}))
	wantCode(t, "signal 2", err, connect.CodeUnimplemented)
	in := &processpb.ProcessInput{Input: &processpb.ProcessInput_Stdin{Stdin: []byte("x")}}
	_, err = f.proc.SendInput(ctx, connect.NewRequest(&processpb.SendInputRequest{Process: byPID(pid), Input: in}))
	wantCode(t, "stdin that is not connected", err, connect.CodeInternal)
	_, err = f.proc.Update(ctx, connect.NewRequest(&processpb.UpdateRequest{Process: byPID(pid), Pty: &processpb.PTY{Size: &processpb.PTY_Size{Cols: 1, Rows: 1}}}))
	wantCode(t, "resize without a terminal", err, connect.CodeInternal)
}

func TestProcessesRunAsTheirUser(t *testing.T) {
	f := newFixture(t, Config{})
	for user, want := range map[string]string{
		"nobody":    "65534:65534:65534:/nonexistent:nobody:nobody",
		"1234":      "1234:0:0:/:1234:1234",
		"1234:5678": "1234:5678:5678:/:1234:1234",
		"root:tty":  "0:5:5:/root:root:root",
		"":          "0:0:0:/root:root:root",
	} {
		r, err := f.run(t, as(user, shell(`echo $(id -u):$(id -g):$(id -G):$HOME:$USER:$LOGNAME`)))
		if err != nil || strings.TrimSpace(r.out) != want {
			t.Errorf("user %q: got %q, want %q (%v)", user, r.out, want, err)
		}
	}
}

func TestStdinReachesTheProcessAndCloses(t *testing.T) {
	f := newFixture(t, Config{})
	req := shell("cat; echo closed; sleep 60")
	req.Stdin = nil // absent means connected
	pid, st := f.begin(t, t.Context(), req)
	send := func(text string) error {
		in := &processpb.ProcessInput{Input: &processpb.ProcessInput_Stdin{Stdin: []byte(text)}}
		_, err := f.proc.SendInput(t.Context(), connect.NewRequest(&processpb.SendInputRequest{Process: byPID(pid), Input: in}))
		return err
	}
	if err := errors.Join(send("one "), send("two ")); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := f.proc.CloseStdin(t.Context(), connect.NewRequest(&processpb.CloseStdinRequest{Process: byPID(pid)})); err != nil {
			t.Fatalf("close stdin: %v", err)
		}
	}
	wantCode(t, "input after the close", send("x"), connect.CodeInternal)
	var r result
	for !strings.Contains(r.out, "closed") && st.Receive() {
		r.add(st.Msg().GetEvent())
	}
	if r.out != "one two closed\n" {
		t.Errorf("output %q", r.out)
	}
}

func TestStreamInputWritesInOrder(t *testing.T) {
	f := newFixture(t, Config{})
	tag := "writer"
	req := shell("head -c 6")
	req.Stdin, req.Tag = nil, &tag
	_, st := f.begin(t, t.Context(), req)
	in := f.proc.StreamInput(t.Context())
	sel := &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Tag{Tag: tag}}
	events := []*processpb.StreamInputRequest{
		{Event: &processpb.StreamInputRequest_Start{Start: &processpb.StreamInputRequest_StartEvent{Process: sel}}},
		{Event: &processpb.StreamInputRequest_Keepalive{Keepalive: &processpb.StreamInputRequest_KeepAlive{}}},
	}
	for _, text := range []string{"abc", "def"} {
		input := &processpb.ProcessInput{Input: &processpb.ProcessInput_Stdin{Stdin: []byte(text)}}
		events = append(events, &processpb.StreamInputRequest{Event: &processpb.StreamInputRequest_Data{Data: &processpb.StreamInputRequest_DataEvent{Input: input}}})
	}
	for _, ev := range events {
		if err := in.Send(ev); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := in.CloseAndReceive(); err != nil {
		t.Fatal(err)
	}
	var r result
	for st.Receive() {
		r.add(st.Msg().GetEvent())
	}
	if r.out != "abcdef" {
		t.Errorf("output %q", r.out)
	}
}

func TestTerminalHasSizeAndBelongsToTheUser(t *testing.T) {
	f := newFixture(t, Config{})
	req := shell("stty size; stat -c %U $(tty); read line; stty size; echo got $line $TERM")
	req.Pty = &processpb.PTY{Size: &processpb.PTY_Size{Cols: 80, Rows: 25}}
	st, err := f.proc.Start(t.Context(), as("nobody", req))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	var r result
	for !strings.Contains(r.pty, "nobody\r\n") && st.Receive() {
		r.add(st.Msg().GetEvent())
	}
	if !strings.HasPrefix(r.pty, "25 80\r\n") {
		t.Fatalf("terminal says %q (%v)", r.pty, st.Err())
	}
	size := &processpb.PTY{Size: &processpb.PTY_Size{Cols: 100, Rows: 30}}
	if _, err := f.proc.Update(t.Context(), connect.NewRequest(&processpb.UpdateRequest{Process: byPID(r.pid), Pty: size})); err != nil {
		t.Fatal(err)
	}
	_, err = f.proc.CloseStdin(t.Context(), connect.NewRequest(&processpb.CloseStdinRequest{Process: byPID(r.pid)}))
	wantCode(t, "closing a terminal", err, connect.CodeInternal)
	in := &processpb.ProcessInput{Input: &processpb.ProcessInput_Pty{Pty: []byte("typed\n")}}
	if _, err := f.proc.SendInput(t.Context(), connect.NewRequest(&processpb.SendInputRequest{Process: byPID(r.pid), Input: in})); err != nil {
		t.Fatal(err)
	}
	for st.Receive() {
		r.add(st.Msg().GetEvent())
	}
	if !strings.Contains(r.pty, "30 100\r\ngot typed xterm-256color\r\n") || r.end.GetExitCode() != 0 {
		t.Errorf("terminal says %q, end %v", r.pty, r.end)
	}
}

func TestDeadlineKillsWhatEscapedTheSession(t *testing.T) {
	f := newFixture(t, Config{Cgroups: cgroupDir(t)})
	ctx, cancel := context.WithTimeout(t.Context(), 700*time.Millisecond)
	defer cancel()
	st, err := f.proc.Start(ctx, connect.NewRequest(shell("setsid sleep 1000 & echo $!; sleep 1000")))
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	var r result
	for st.Receive() {
		r.add(st.Msg().GetEvent())
	}
	wantCode(t, "call", st.Err(), connect.CodeDeadlineExceeded)
	escaped, err := strconv.Atoi(strings.TrimSpace(r.out))
	if err != nil {
		t.Fatalf("output %q", r.out)
	}
	for _, pid := range []int{escaped, int(r.pid)} {
		testenv.Eventually(t, 5*time.Second, func() error { return gone(pid) })
	}
}

// gone returns nil when the process does not run any more.
func gone(pid int) error {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil || strings.Contains(string(stat), ") Z ") {
		return nil
	}
	return fmt.Errorf("process %d still runs", pid)
}

func TestDeadlineFiresWhileStdinIsOpen(t *testing.T) {
	f := newFixture(t, Config{})
	req := connect.NewRequest(&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "cat"}})
	req.Header().Set(TimeoutHeader, "100")
	r, err := f.run(t, req)
	if err != nil || r.end.GetStatus() != "signal: killed" || r.end.GetError() != reasonDeadline {
		t.Errorf("end %v, %v", r.end, err)
	}
}

func TestGrandchildThatHoldsStdoutDoesNotHoldTheCall(t *testing.T) {
	f := newFixture(t, Config{Cgroups: cgroupDir(t)})
	begun := time.Now()
	r, err := f.run(t, connect.NewRequest(shell("(sleep 2; echo late && exec sleep 1000) & echo $!; head -c 3000000 /dev/zero | tr '\\0' z")))
	if err != nil || r.end == nil {
		t.Fatalf("%v %v", r.end, err)
	}
	if took := time.Since(begun); took > 10*time.Second {
		t.Errorf("the call took %v", took)
	}
	if n := strings.Count(r.out, "z"); n != 3000000 {
		t.Errorf("%d bytes of output", n)
	}
	line, _, _ := strings.Cut(r.out, "\n")
	holder, err := strconv.Atoi(line)
	if err != nil {
		t.Fatal(err)
	}
	// It writes after the end: the pipe must not have broken.
	testenv.Eventually(t, 10*time.Second, func() error {
		cmd, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", holder))
		if err != nil {
			return err
		}
		if string(cmd) != "sleep\x001000\x00" {
			return fmt.Errorf("the grandchild is %q", cmd)
		}
		return nil
	})
}
