package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	processpb "github.com/cubesandbox/cubelet/api/envd/process"
	"github.com/cubesandbox/cubelet/api/envd/process/processconnect"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

func TestProcessOutlivesItsClient(t *testing.T) {
	f := newFixture(t, Config{})
	ctx, cancel := context.WithCancel(t.Context())
	tag := "survivor"
	req := shell("read line; echo back; exit 7")
	req.Stdin, req.Tag = nil, &tag
	pid, st := f.begin(t, ctx, req)
	cancel()
	for st.Receive() {
	}
	list, err := f.proc.List(t.Context(), connect.NewRequest(&processpb.ListRequest{}))
	if err != nil || len(list.Msg.GetProcesses()) != 1 || list.Msg.GetProcesses()[0].GetPid() != pid || list.Msg.GetProcesses()[0].GetTag() != tag {
		t.Fatalf("list %v, %v", list, err)
	}
	sel := &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Tag{Tag: tag}}
	again, err := f.proc.Connect(t.Context(), connect.NewRequest(&processpb.ConnectRequest{Process: sel}))
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	var r result
	again.Receive()
	r.add(again.Msg().GetEvent())
	in := &processpb.ProcessInput{Input: &processpb.ProcessInput_Stdin{Stdin: []byte("go\n")}}
	if _, err := f.proc.SendInput(t.Context(), connect.NewRequest(&processpb.SendInputRequest{Process: sel, Input: in})); err != nil {
		t.Fatal(err)
	}
	for again.Receive() {
		r.add(again.Msg().GetEvent())
	}
	if r.pid != pid || r.out != "back\n" || r.end.GetExitCode() != 7 {
		t.Errorf("connected: %+v", r)
	}
	// The end is kept for those who come late.
	late, err := f.proc.Connect(t.Context(), connect.NewRequest(&processpb.ConnectRequest{Process: byPID(pid)}))
	if err != nil {
		t.Fatal(err)
	}
	defer late.Close()
	r = result{}
	for late.Receive() {
		r.add(late.Msg().GetEvent())
	}
	if r.pid != pid || r.out != "" || r.end.GetExitCode() != 7 {
		t.Errorf("late: %+v", r)
	}
	_, err = f.proc.SendSignal(t.Context(), connect.NewRequest(&processpb.SendSignalRequest{Process: byPID(pid), Signal: 15}))
	wantCode(t, "signal to an ended process", err, connect.CodeNotFound)
}

func TestEndedProcessesAreForgotten(t *testing.T) {
	f := newFixture(t, Config{})
	r, err := f.run(t, connect.NewRequest(shell("true")))
	if err != nil {
		t.Fatal(err)
	}
	p := f.procs.find(func(p *process) bool { return p.pid == int(r.pid) })
	if p == nil {
		t.Fatal("the process is not kept")
	}
	p.hub.mu.Lock()
	p.hub.end.at = p.hub.end.at.Add(-keepEnded)
	p.hub.mu.Unlock()
	if f.procs.find(func(p *process) bool { return p.pid == int(r.pid) }) != nil {
		t.Error("the process is kept for ever")
	}
}

func TestKeepalivesComeWhileNothingElseDoes(t *testing.T) {
	f := newFixture(t, Config{})
	req := connect.NewRequest(shell("sleep 60"))
	req.Header().Set("Keepalive-Ping-Interval", "1")
	st, err := f.proc.Start(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	st.Receive()
	if !st.Receive() || st.Msg().GetEvent().GetKeepalive() == nil {
		t.Errorf("got %v, %v", st.Msg(), st.Err())
	}
}

// A reader that reads nothing gets cut off, and nobody else notices.
func TestSlowReaderHoldsUpNobody(t *testing.T) {
	f := newFixture(t, Config{})
	const total = 16 << 20
	req := shell(fmt.Sprintf("read go; head -c %d /dev/zero; read stop", total))
	req.Stdin = nil
	pid, slow := f.begin(t, t.Context(), req)
	fast, err := f.proc.Connect(t.Context(), connect.NewRequest(&processpb.ConnectRequest{Process: byPID(pid)}))
	if err != nil {
		t.Fatal(err)
	}
	defer fast.Close()
	fast.Receive()
	in := &processpb.ProcessInput{Input: &processpb.ProcessInput_Stdin{Stdin: []byte("go\n")}}
	if _, err := f.proc.SendInput(t.Context(), connect.NewRequest(&processpb.SendInputRequest{Process: byPID(pid), Input: in})); err != nil {
		t.Fatal(err)
	}
	got := 0
	for got < total && fast.Receive() {
		got += len(fast.Msg().GetEvent().GetData().GetStdout())
	}
	if got != total {
		t.Fatalf("the fast reader got %d bytes: %v", got, fast.Err())
	}
	if _, err := f.run(t, connect.NewRequest(shell("true"))); err != nil {
		t.Errorf("another program: %v", err)
	}
	for slow.Receive() {
	}
	wantCode(t, "slow reader", slow.Err(), connect.CodeResourceExhausted)
}

func TestSingleSlowReaderLosesNothing(t *testing.T) {
	f := newFixture(t, Config{})
	const total = 20 << 20
	_, st := f.begin(t, t.Context(), shell(fmt.Sprintf("head -c %d /dev/zero", total)))
	testenv.Eventually(t, 10*time.Second, func() error { return stalled(f) })
	got := 0
	var r result
	for st.Receive() {
		got += len(st.Msg().GetEvent().GetData().GetStdout())
		r.end = st.Msg().GetEvent().GetEnd()
	}
	if got != total || r.end.GetExitCode() != 0 || r.end == nil {
		t.Errorf("got %d bytes, end %v, %v", got, r.end, st.Err())
	}
}

// stalled returns nil when a subscriber's queue is as full as it may be.
func stalled(f *fixture) error {
	for _, p := range f.procs.running() {
		p.hub.mu.Lock()
		defer p.hub.mu.Unlock()
		for _, s := range p.hub.subs {
			if s.size >= softBacklog {
				return nil
			}
		}
	}
	return errors.New("the program does not wait for its reader")
}

// In a PID namespace the agent is PID 1: it must reap what it inherits and never lose the
// exit status of what it started, however the two mix.
func TestPID1ReapsOrphansAndKeepsStatuses(t *testing.T) {
	testenv.RequireRoot(t)
	cmd := exec.Command("unshare", "--fork", "--pid", "--mount-proc", "--kill-child",
		testenv.Binary(t, "cube-agent"), "--no-init", "--listen", "127.0.0.1:0")
	logs, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	url := "http://" + servedAddress(t, logs)
	f := &fixture{url: url, http: newHTTP(t)}
	f.proc = processconnect.NewProcessClient(f.http, url)

	var group sync.WaitGroup
	for worker := range 4 {
		group.Go(func() {
			for i := range 25 {
				want := int32(worker*25 + i)
				script := fmt.Sprintf("for i in 1 2 3 4 5; do setsid sh -c 'exit 9' & done; exit %d", want)
				r, err := f.run(t, connect.NewRequest(shell(script)))
				if err != nil || r.end.GetExitCode() != want || !r.end.GetExited() {
					t.Errorf("exit %d: got %v, %v", want, r.end, err)
				}
			}
		})
	}
	group.Wait()
	testenv.Eventually(t, 10*time.Second, func() error {
		r, err := f.run(t, connect.NewRequest(shell("cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z ' || true")))
		if err != nil {
			return err
		}
		if n, err := strconv.Atoi(strings.TrimSpace(r.out)); err != nil || n > 0 {
			return fmt.Errorf("zombies: %q", r.out)
		}
		return nil
	})
}

// servedAddress waits for the agent's log line and drains the rest.
func servedAddress(t *testing.T, logs io.Reader) string {
	t.Helper()
	buf := make([]byte, 4096)
	text := ""
	for {
		n, err := logs.Read(buf)
		text += string(buf[:n])
		if _, rest, ok := strings.Cut(text, "address="); ok && strings.Contains(rest, "\n") {
			go io.Copy(io.Discard, logs)
			addr, _, _ := strings.Cut(rest, "\n")
			if _, _, err := net.SplitHostPort(addr); err != nil {
				t.Fatalf("address %q: %v", addr, err)
			}
			return addr
		}
		if err != nil {
			t.Fatalf("the agent says %q: %v", text, err)
		}
	}
}
