package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	processpb "github.com/cubesandbox/cubelet/api/envd/process"
)

// fakeMachine records what was done to it.
type fakeMachine struct {
	mu   sync.Mutex
	done []string
	fail error
}

func (m *fakeMachine) note(format string, args ...any) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.done = append(m.done, fmt.Sprintf(format, args...))
	return m.fail
}

func (m *fakeMachine) SetTime(t time.Time) error        { return m.note("time %d", t.Unix()) }
func (m *fakeMachine) AddEntropy(b []byte) error        { return m.note("entropy %d", len(b)) }
func (m *fakeMachine) SetHostname(s string) error       { return m.note("hostname %s", s) }
func (m *fakeMachine) SetMachineID(s string) error      { return m.note("machine-id %s", s) }
func (m *fakeMachine) SetNameservers(s []string) error  { return m.note("nameservers %v", s) }
func (m *fakeMachine) SetAddress(addr, gw string) error { return m.note("address %s %s", addr, gw) }
func (m *fakeMachine) PowerOff() error                  { return m.note("power off") }

func (m *fakeMachine) String() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return strings.Join(m.done, "; ")
}

// post sends a request with a token and returns its status and body.
func (f *fixture) post(t *testing.T, path, token, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.url+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if token != "" {
		req.Header.Set(tokenHeader, token)
	}
	res, err := f.http.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, string(b)
}

func TestInitMakesTheMachineTheSandboxs(t *testing.T) {
	m := &fakeMachine{}
	f := newFixture(t, Config{Machine: m})
	body := `{"envVars":{"A":"1"},"accessToken":"t1","timestamp":"2026-01-02T03:04:05Z","defaultUser":"nobody","defaultWorkdir":"/tmp",
		"cube":{"sandboxID":"sb","templateID":"tpl","hostname":"h","machineID":"0123","entropy":"AAAA","address":"10.0.0.2/24","gateway":"10.0.0.1",
		"nameservers":["10.0.0.1"],"entrypoint":["/bin/sh","-c"],"cmd":["id -un; pwd; echo $A $E2B_SANDBOX $E2B_SANDBOX_ID $E2B_TEMPLATE_ID"]}}`
	if status, text := f.post(t, "/init", "", body); status != http.StatusNoContent {
		t.Fatalf("%d %s", status, text)
	}
	want := "time 1767323045; entropy 3; dir /tmp 65534:65534; address 10.0.0.2/24 10.0.0.1; hostname h; machine-id 0123; nameservers [10.0.0.1]"
	if m.String() != want {
		t.Errorf("did %s\nwant %s", m, want)
	}
	off := false
	req := connect.NewRequest(&processpb.StartRequest{Stdin: &off})
	req.Header().Set(tokenHeader, "t1")
	r, err := f.run(t, req)
	if err != nil || r.out != "nobody\n/tmp\n1 true sb tpl\n" {
		t.Errorf("the image's command printed %q, %v", r.out, err)
	}
}

func TestInitNeedsTheTokenOnceThereIsOne(t *testing.T) {
	m := &fakeMachine{}
	f := newFixture(t, Config{Machine: m})
	for _, c := range []struct {
		name, token, body string
		want              int
	}{
		{"before a token is set", "", `{}`, 204},
		{"malformed", "", `{`, 400},
		{"sets the token", "", `{"accessToken":"t1"}`, 204},
		{"without it", "", `{}`, 401},
		{"with another", "t2", `{"accessToken":"t3"}`, 401},
		{"repeated", "", `{"accessToken":"t1"}`, 204},
		{"changes it", "t1", `{"accessToken":"t2"}`, 204},
		{"with the old one", "t1", `{}`, 401},
		{"with the new one", "t2", `{}`, 204},
	} {
		if status, text := f.post(t, "/init", c.token, c.body); status != c.want {
			t.Errorf("%s: %d %s", c.name, status, text)
		}
	}
	if status, text := f.post(t, "/signal", "", `{}`); status != http.StatusUnauthorized || !strings.HasPrefix(text, `{"code":401,`) {
		t.Errorf("signal without a token: %d %s", status, text)
	}
	_, err := f.run(t, connect.NewRequest(shell("true")))
	wantCode(t, "start without a token", err, connect.CodeUnauthenticated)
}

func TestLateInitDoesNotTurnTheClockBack(t *testing.T) {
	m := &fakeMachine{}
	f := newFixture(t, Config{Machine: m})
	for _, at := range []string{"2026-01-02T03:04:06Z", "2026-01-02T03:04:05Z"} {
		if status, text := f.post(t, "/init", "", `{"timestamp":"`+at+`"}`); status != 204 {
			t.Fatalf("%d %s", status, text)
		}
	}
	if m.String() != "time 1767323046" {
		t.Errorf("did %s", m)
	}
}

func TestFailedInitSaysWhatFailedAndKeepsTheIdentity(t *testing.T) {
	m := &fakeMachine{fail: errors.New("broken")}
	f := newFixture(t, Config{Machine: m})
	status, text := f.post(t, "/init", "", `{"accessToken":"t","cube":{"hostname":"h"}}`)
	if status != http.StatusInternalServerError || !strings.Contains(text, "set hostname: broken") {
		t.Errorf("%d %s", status, text)
	}
	if f.identity().token != "" {
		t.Error("a failed init set the token")
	}
}

func TestPlainEndpoints(t *testing.T) {
	m := &fakeMachine{}
	f := newFixture(t, Config{Machine: m})
	get := func(path string) (int, string) {
		res, err := f.http.Get(f.url + path)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		b, _ := io.ReadAll(res.Body)
		return res.StatusCode, string(b)
	}
	if status, body := get("/health"); status != http.StatusNoContent || body != "" {
		t.Errorf("health: %d %q", status, body)
	}
	if status, body := get("/envs"); status != 200 || body != "{}" {
		t.Errorf("envs: %d %q", status, body)
	}
	status, body := get("/metrics")
	var metrics metricsBody
	if err := json.Unmarshal([]byte(body), &metrics); err != nil || status != 200 || metrics.MemTotal == 0 || metrics.DiskTotal == 0 || metrics.CPUCount == 0 || metrics.TS == 0 {
		t.Errorf("metrics: %d %s", status, body)
	}
	if status, _ := get("/nothing"); status != http.StatusNotFound {
		t.Errorf("unknown path: %d", status)
	}
	if status, body := f.post(t, "/shutdown", "", ""); status != http.StatusNoContent {
		t.Errorf("shutdown: %d %s", status, body)
	}
	waitFor(t, func() error {
		if m.String() != "power off" {
			return errors.New("not powered off")
		}
		return nil
	})
}

func TestAnySignalReachesTheProcess(t *testing.T) {
	f := newFixture(t, Config{})
	pid, st := f.begin(t, t.Context(), shell("trap 'echo hup; exit 5' HUP; echo ready; while :; do sleep 0.05; done"))
	var r result
	for !strings.Contains(r.out, "ready") && st.Receive() {
		r.add(st.Msg().GetEvent())
	}
	for body, want := range map[string]int{`{"pid":1073741824,"signal":1}`: 404, fmt.Sprintf(`{"pid":%d,"signal":65}`, pid): 400, `x`: 400} {
		if status, text := f.post(t, "/signal", "", body); status != want {
			t.Errorf("%s: %d %s", body, status, text)
		}
	}
	if status, text := f.post(t, "/signal", "", fmt.Sprintf(`{"pid":%d,"signal":1}`, pid)); status != 204 {
		t.Fatalf("%d %s", status, text)
	}
	for st.Receive() {
		r.add(st.Msg().GetEvent())
	}
	if !strings.Contains(r.out, "hup") || r.end.GetExitCode() != 5 {
		t.Errorf("%+v", r)
	}
}
