package agent

import (
	"bufio"
	"context"
	"encoding/base64"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/goleak"

	"github.com/cubesandbox/cubelet/api/envd/filesystem/filesystemconnect"
	"github.com/cubesandbox/cubelet/api/envd/process/processconnect"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

func TestMain(m *testing.M) {
	// The HTTP server lingers for half a second on a connection whose request it refused.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("net/http.(*conn).closeWriteAndWait"))
}

// fixture is an agent that serves on the loopback interface, and its clients, which
// speak JSON as E2B's JavaScript SDK does.
type fixture struct {
	*Server
	url  string
	http *http.Client
	proc processconnect.ProcessClient
	fs   filesystemconnect.FilesystemClient
}

func newFixture(t *testing.T, cfg Config) *fixture {
	t.Helper()
	testenv.RequireRoot(t)
	cfg.Log = slog.New(slog.DiscardHandler)
	s, err := New(cfg)
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
	f := &fixture{Server: s, url: "http://" + l.Addr().String(), http: newHTTP(t)}
	f.proc = processconnect.NewProcessClient(f.http, f.url, connect.WithProtoJSON())
	f.fs = filesystemconnect.NewFilesystemClient(f.http, f.url, connect.WithProtoJSON())
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return f
}

func newHTTP(t *testing.T) *http.Client {
	transport := &http.Transport{DisableCompression: true}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

// cgroupDir makes a group of the host's cgroup v2 hierarchy for an agent.
func cgroupDir(t *testing.T) string {
	t.Helper()
	mounts, err := os.Open("/proc/mounts")
	if err != nil {
		t.Fatal(err)
	}
	defer mounts.Close()
	for lines := bufio.NewScanner(mounts); lines.Scan(); {
		f := strings.Fields(lines.Text())
		if f[2] != "cgroup2" {
			continue
		}
		dir := filepath.Join(f[1], "cube-agent-test-"+filepath.Base(t.TempDir())+"-"+time.Now().Format("150405.000000"))
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			testenv.Eventually(t, 5*time.Second, func() error { return removeGroups(dir) })
		})
		return dir
	}
	t.Fatal("the test needs a mounted cgroup v2 hierarchy")
	return ""
}

// as sets the user of a request as E2B's SDK does.
func as[T any](user string, m *T) *connect.Request[T] {
	r := connect.NewRequest(m)
	if user != "" {
		r.Header().Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(user+":")))
	}
	return r
}

func wantCode(t *testing.T, what string, err error, code connect.Code) {
	t.Helper()
	if got := connect.CodeOf(err); err == nil || got != code {
		t.Errorf("%s: got %v (%v), want %v", what, got, err, code)
	}
}

// removeGroups removes a group and those below it, whose processes are dying.
func removeGroups(dir string) error {
	below, err := filepath.Glob(dir + "/*/cgroup.procs")
	if err != nil {
		return err
	}
	for _, procs := range below {
		if err := os.Remove(filepath.Dir(procs)); err != nil {
			return err
		}
	}
	return os.Remove(dir)
}
