package server

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
	"github.com/cubesandbox/cubelet/api/cube/v1/cubev1connect"
	"github.com/cubesandbox/cubelet/internal/cubetest"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

func TestSocketIsPrivateAndRemovedAtTheEnd(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(path)
	if err != nil || st.Mode().Perm() != 0o600 || st.Mode().Type() != fs.ModeSocket {
		t.Fatalf("%v, %v", st, err)
	}
	if l.Addr().String() != path {
		t.Errorf("address %s", l.Addr())
	}
	if _, err := ListenUnix(path); cube.CodeOf(err) != cube.CodeAlreadyExists {
		t.Errorf("second listener: %v", err)
	}
	if err := errors.Join(l.Close(), l.Close()); err != nil {
		t.Fatal(err)
	}
	if entries, _ := os.ReadDir(filepath.Dir(path)); len(entries) > 0 {
		t.Errorf("left: %v", entries)
	}
}

func TestStaleSocketIsReplacedAndAFileIsNot(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "s")
	old, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	old.SetUnlinkOnClose(false)
	_ = old.Close()
	l, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ListenUnix(file); cube.CodeOf(err) != cube.CodeAlreadyExists {
		t.Errorf("error %v", err)
	}
	if b, _ := os.ReadFile(file); string(b) != "precious" {
		t.Errorf("the file holds %q", b)
	}
}

// connectTo is what a process of another user does: it asks for the node's version.
func connectTo(path string) int {
	conn, err := net.Dial("unix", path)
	if err != nil {
		return 2
	}
	defer conn.Close()
	_, _ = io.WriteString(conn, "POST /cube.v1.NodeService/GetVersion HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
	if n, _ := conn.Read(make([]byte, 1)); n == 0 {
		return 3
	}
	return 0
}

func TestPeersOfOtherUsersAreTurnedAway(t *testing.T) {
	testenv.RequireRoot(t)
	r := newRig(t)
	// Everybody may open the socket, so that only the credentials decide.
	for _, p := range []string{filepath.Dir(r.socket), r.socket} {
		if err := os.Chmod(p, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	self := copyOfSelf(t)
	for uid, want := range map[uint32]int{0: 0, 65534: 3} {
		cmd := exec.CommandContext(t.Context(), self, "connect-to", r.socket)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		err := cmd.Run()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		if got := cmd.ProcessState.ExitCode(); got != want {
			t.Errorf("uid %d: exit code %d, want %d", uid, got, want)
		}
	}
}

// copyOfSelf puts the test binary where every user can run it.
func copyOfSelf(t *testing.T) string {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "cube")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := filepath.Join(dir, "self")
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(path, b, 0o755)); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestRefusalIsReportedAndServingGoesOn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	ul := l.(*unixListener)
	refused := make(chan error, 1)
	allow := make(chan bool, 2)
	ul.allowed = func(*unix.Ucred) bool { return <-allow }
	ul.refused = func(err error) { refused <- err }
	defer l.Close()
	for _, ok := range []bool{false, true} {
		allow <- ok
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	if err := <-refused; cube.CodeOf(err) != cube.CodePermissionDenied {
		t.Errorf("error %v", err)
	}
}

func TestPlainTCPCannotBeServed(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := Serve(t.Context(), []net.Listener{l}, http.NotFoundHandler(), quiet()); err == nil {
		t.Fatal("it was served")
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the listener is open: %v", err)
	}
}

func TestTCPNeedsMutualTLS13(t *testing.T) {
	ours, theirs := cubetest.NewAuthority(t, "ours"), cubetest.NewAuthority(t, "theirs")
	ours.IssueServer("server")
	ours.IssueClient("client")
	theirs.IssueClient("client")

	l, err := ListenTLS("127.0.0.1:0", ours.File("server.crt"), ours.File("server.key"), ours.File("ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	n := cubetest.New(t)
	handler := New(Config{Sandboxes: n.Sandboxes(), Templates: n.Templates(), Node: n.Node(), Log: quiet()})
	run(t, []net.Listener{l}, handler)
	for name, tt := range map[string]struct {
		config *tls.Config
		ok     bool
	}{
		"right":              {&tls.Config{RootCAs: ours.Pool(), Certificates: []tls.Certificate{ours.Pair("client")}}, true},
		"no certificate":     {&tls.Config{RootCAs: ours.Pool()}, false},
		"another CA":         {&tls.Config{RootCAs: ours.Pool(), Certificates: []tls.Certificate{theirs.Pair("client")}}, false},
		"server's":           {&tls.Config{RootCAs: ours.Pool(), Certificates: []tls.Certificate{ours.Pair("server")}}, false},
		"TLS 1.2":            {&tls.Config{RootCAs: ours.Pool(), Certificates: []tls.Certificate{ours.Pair("client")}, MaxVersion: tls.VersionTLS12}, false},
		"server not trusted": {&tls.Config{RootCAs: theirs.Pool(), Certificates: []tls.Certificate{ours.Pair("client")}}, false},
	} {
		for _, h2 := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s h2=%v", name, h2), func(t *testing.T) {
				tr := &http.Transport{TLSClientConfig: tt.config.Clone(), ForceAttemptHTTP2: h2}
				defer tr.CloseIdleConnections()
				c := cubev1connect.NewNodeServiceClient(&http.Client{Transport: tr}, "https://"+l.Addr().String())
				_, err := c.GetVersion(t.Context(), connect.NewRequest(&cubev1.GetVersionRequest{}))
				if (err == nil) != tt.ok {
					t.Errorf("error %v", err)
				}
			})
		}
	}
	t.Run("plain text", func(t *testing.T) {
		for name, client := range map[string]func() *http.Client{"HTTP/1.1": func() *http.Client { return &http.Client{Transport: &http.Transport{}} }, "h2c": plainH2} {
			c := client()
			res, err := c.Post("http://"+l.Addr().String()+"/cube.v1.NodeService/GetVersion", "application/json", nil)
			if err == nil {
				_ = res.Body.Close()
				if res.StatusCode != http.StatusBadRequest {
					t.Errorf("%s: %s", name, res.Status)
				}
			}
			c.CloseIdleConnections()
		}
	})
	for i, files := range [][3]string{
		{"", ours.File("server.key"), ours.File("ca.crt")},
		{ours.File("server.crt"), ours.File("server.key"), ""},
		{ours.File("server.crt"), ours.File("client.key"), ours.File("ca.crt")},
		{ours.File("server.crt"), ours.File("server.key"), ours.File("ca.key")},
	} {
		if l, err := ListenTLS("127.0.0.1:0", files[0], files[1], files[2]); err == nil {
			_ = l.Close()
			t.Errorf("case %d listens", i)
		}
	}
}

func plainH2() *http.Client {
	var p http.Protocols
	p.SetUnencryptedHTTP2(true)
	return &http.Client{Transport: &http.Transport{Protocols: &p}}
}

// blocking is a handler whose calls wait until they are canceled or released.
func blocking(started chan<- string, release <-chan struct{}) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		started <- r.URL.Path
		select {
		case <-release:
			_, _ = io.WriteString(w, "done")
		case <-r.Context().Done():
			_, _ = io.WriteString(w, context.Cause(r.Context()).Error())
		}
	})
}

func TestShutdownLetsCallsFinishAndEndsStreams(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	started, release := make(chan string, 3), make(chan struct{})
	s := &serving{
		handler: blocking(started, release), log: quiet(), streams: streamPaths(),
		grace: grace{streams: 50 * time.Millisecond, calls: time.Minute, abort: time.Second},
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- s.run(ctx, []net.Listener{l}) }()
	r := &rig{socket: path}
	answers := map[string]chan string{}
	for _, p := range []string{"/unary", cubev1connect.SandboxServiceExecSandboxProcedure, "/guest/s1/files"} {
		answers[p] = make(chan string, 1)
		client := r.client(t, true)
		go func() {
			res, err := client.Get(base + p)
			if err != nil {
				answers[p] <- err.Error()
				return
			}
			defer res.Body.Close()
			b, _ := io.ReadAll(res.Body)
			answers[p] <- string(b)
		}()
		<-started
	}
	cancel()
	const stopping = "the node is shutting down"
	for _, p := range []string{cubev1connect.SandboxServiceExecSandboxProcedure, "/guest/s1/files"} {
		if got := <-answers[p]; got != stopping {
			t.Errorf("%s: %q", p, got)
		}
	}
	select {
	case err := <-served:
		t.Fatalf("it did not wait for the call: %v", err)
	default:
	}
	close(release)
	if got := <-answers["/unary"]; got != "done" {
		t.Errorf("unary: %q", got)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
}

func TestShutdownCancelsCallsThatTakeTooLong(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	n := cubetest.New(t)
	started := make(chan struct{})
	n.On("create", func(ctx context.Context) error {
		close(started)
		<-ctx.Done()
		return ctx.Err()
	})
	s := &serving{
		handler: New(Config{Sandboxes: n.Sandboxes(), Templates: n.Templates(), Node: n.Node(), Log: quiet()}),
		log:     quiet(), streams: streamPaths(),
		grace: grace{streams: time.Millisecond, calls: 50 * time.Millisecond, abort: 10 * time.Second},
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- s.run(ctx, []net.Listener{l}) }()
	r := &rig{socket: path}
	r.http = r.client(t, true)
	answer := make(chan error, 1)
	go func() {
		_, err := newSandboxes(r).CreateSandbox(t.Context(), connect.NewRequest(&cubev1.CreateSandboxRequest{TemplateId: "base"}))
		answer <- err
	}()
	<-started
	cancel()
	want(t, <-answer, connect.CodeUnavailable, "UNAVAILABLE", "")
	if err := <-served; err != nil {
		t.Error(err)
	}
}
