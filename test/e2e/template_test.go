package e2e

import (
	"encoding/base64"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/cubesandbox/cubelet/internal/testenv"
)

func testBaseTemplate(t *testing.T, n *node) {
	id := n.must("template", "create", "--name", "base", "--from-archive", testenv.BaseArchive(t), "-q")
	if !strings.HasPrefix(id, "tpl-") {
		t.Errorf("ID = %q", id)
	}
	type tpl struct {
		ID, State string
		Names     []string
	}
	got := decode[tpl](t, n.must("template", "inspect", "base", "-o", "json"))
	if got.ID != id || len(got.Names) != 1 || got.Names[0] != "base" {
		t.Errorf("inspect = %+v", got)
	}
	if list := n.must("template", "list", "-q"); list != id {
		t.Errorf("list = %q; want %s", list, id)
	}
}

func testTinyImage(t *testing.T, n *node) {
	img := saveImage(t, tinyImage(t, func(c *v1.Config) {
		c.Env = []string{"PATH=/", "GREETING=hello from the image"}
		c.WorkingDir = "/work/dir"
	}))
	tpl := n.must("template", "create", "--name", "tiny", "--from-archive", img, "--memory", "256", "--env", "EXTRA=1", "-q")
	id := n.create("--template-id", "tiny", "--env", "MINE=2")
	for _, c := range []struct{ want, args string }{
		{"from the image", ""},
		{"hello from the image", "/prog env GREETING"},
		{"1", "/prog env EXTRA"},
		{"2", "/prog env MINE"},
		{id, "/prog env E2B_SANDBOX_ID"},
		{"/work/dir", "/prog cwd"},
	} {
		if got := n.exec(id, strings.Fields(c.args)...); got != c.want {
			t.Errorf("exec %q = %q; want %q", c.args, got, c.want)
		}
	}
	n.must("sandbox", "delete", id)
	n.must("template", "delete", tpl)
}

func testStartCommand(t *testing.T, n *node) {
	const server = `cd /tmp && echo from the template > index.html && exec python3 -m http.server 8080`
	tpl := n.must("template", "create", "--name", "web", "--from-archive", testenv.BaseArchive(t), "--start-cmd", server, "--ready-port", "8080", "-q")
	id := n.create("--template-id", "web")
	// The server runs already: it was restored with the memory image.
	if got := n.exec(id, "curl", "-s", "http://127.0.0.1:8080/"); got != "from the template" {
		t.Errorf("served %q", got)
	}
	n.must("sandbox", "delete", id)
	n.must("template", "delete", tpl)

	r := n.cli("", "template", "create", "--name", "never", "--from-archive", testenv.BaseArchive(t),
		"--start-cmd", "echo doomed >&2; exit 3", "--ready-port", "8080", "--ready-timeout", "20s")
	if r.code == 0 || !strings.Contains(r.stderr, "doomed") && !strings.Contains(r.stderr, "3") {
		t.Errorf("a start command that fails: exit %d\n%s", r.code, r.stderr)
	}
	if r := n.cli("", "template", "inspect", "never"); r.code == 0 {
		t.Error("the failed template exists")
	}
}

// testRegistryPull pulls through containerd from a registry that asks for a password.
func testRegistryPull(t *testing.T, n *node) {
	reg := registry.New()
	var served atomic.Int64
	// The node lives in a network namespace of its own, so the registry listens there for
	// the node and elsewhere for the test, which pushes.
	var host string
	err := n.inNamespace(func() error {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if user, password, ok := r.BasicAuth(); !ok || user != "cube" || password != "secret" {
				w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			served.Add(1)
			reg.ServeHTTP(w, r)
		}))
		srv.Listener.Close()
		srv.Listener = l
		srv.Start()
		t.Cleanup(srv.Close)
		host = l.Addr().String()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	inside := httptest.NewServer(reg)
	defer inside.Close()
	push, err := name.ParseReference(inside.Listener.Addr().String() + "/library/tiny:1")
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(push, tinyImage(t, nil)); err != nil {
		t.Fatal(err)
	}
	ref := host + "/library/tiny:1"
	r := n.cli("", "template", "create", ref)
	if r.code == 0 || !strings.Contains(strings.ToLower(r.stderr), "unauthorized") && !strings.Contains(strings.ToLower(r.stderr), "permission") && !strings.Contains(strings.ToLower(r.stderr), "credential") {
		t.Errorf("pull without credentials: exit %d\n%s", r.code, r.stderr)
	}
	n.dockerLogin(host, "cube", "secret")
	tpl := n.must("template", "create", ref, "--memory", "256", "-q")
	if served.Load() == 0 {
		t.Error("nothing was pulled")
	}
	id := n.create("--template-id", tpl)
	if got := n.exec(id); got != "from the image" {
		t.Errorf("exec = %q", got)
	}
	n.must("sandbox", "delete", id)
	n.must("template", "delete", tpl)
	if r := n.cli("", "template", "create", host+"/library/absent:1"); r.code == 0 || !strings.Contains(r.stderr, "absent") {
		t.Errorf("pull of an absent image: exit %d\n%s", r.code, r.stderr)
	}
}

func testBadImages(t *testing.T, n *node) {
	dir := t.TempDir()
	good, err := os.ReadFile(saveImage(t, tinyImage(t, nil)))
	if err != nil {
		t.Fatal(err)
	}
	write := func(name string, b []byte) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, b, 0o644); err != nil {
			t.Fatal(err)
		}
		return p
	}
	free := n.poolUsed()
	for name, path := range map[string]string{
		"truncated": write("truncated.tar", good[:len(good)/2]),
		"text":      write("text.tar", []byte("this is not an archive\n")),
		"empty":     write("empty.tar", nil),
		"missing":   filepath.Join(dir, "nowhere.tar"),
		"directory": dir,
	} {
		r := n.cli("", "template", "create", "--name", "bad", "--from-archive", path)
		if r.code == 0 || !strings.HasPrefix(lastError(r.stderr), "Error:") {
			t.Errorf("%s: exit %d\n%s", name, r.code, r.stderr)
		}
	}
	if got := n.poolUsed(); got > free+4<<20 {
		t.Errorf("the pool grew from %d to %d bytes", free, got)
	}
}

// lastError returns the line of the error in what cubecli wrote.
func lastError(stderr string) string {
	for line := range strings.Lines(stderr) {
		if strings.HasPrefix(line, "Error:") {
			return line
		}
	}
	return stderr
}

func testTemplateInUse(t *testing.T, n *node) {
	tpl := n.must("template", "create", "--id", "tpl-12345", "--from-archive", saveImage(t, tinyImage(t, nil)), "--memory", "256", "-q")
	if tpl != "tpl-12345" {
		t.Fatalf("ID = %q", tpl)
	}
	id := n.create("--template-id", "tpl-12345", "--network", `{"cidr":"192.168.10.0/24"}`)
	r := n.cli("", "template", "delete", tpl)
	if r.code == 0 || !strings.Contains(r.stderr, id) {
		t.Errorf("delete of a used template: exit %d\n%s", r.code, r.stderr)
	}
	if got := n.sandbox(id).GuestAddress; got != "192.168.10.2/24" {
		t.Errorf("guest address = %s", got)
	}
	if got := n.exec(id, "/prog", "echo", "reachable"); got != "reachable" {
		t.Errorf("exec = %q", got)
	}
	n.must("sandbox", "delete", id)
	n.must("template", "delete", tpl)
	if r := n.cli("", "template", "delete", tpl); r.code == 0 {
		t.Error("second delete succeeded")
	}
	n.must("template", "delete", "--ignore-missing", tpl)
}

func (n *node) poolUsed() int64 {
	n.t.Helper()
	s := decode[map[string]any](n.t, n.must("node", "status", "-o", "json"))
	for _, key := range []string{"poolUsedBytes", "poolUsed", "pool_used_bytes"} {
		if v, ok := s[key]; ok {
			var b int64
			if _, err := fmt.Sscan(fmt.Sprint(v), &b); err != nil {
				n.t.Fatalf("%s = %v: %v", key, v, err)
			}
			return b
		}
	}
	n.t.Fatalf("node status has no pool use: %v", s)
	return 0
}

// dockerLogin gives the node credentials as `docker login` does.
func (n *node) dockerLogin(host, user, password string) {
	n.t.Helper()
	auth := base64.StdEncoding.EncodeToString([]byte(user + ":" + password))
	if err := os.MkdirAll(n.dockerDir(), 0o700); err != nil {
		n.t.Fatal(err)
	}
	conf := fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, host, auth)
	if err := os.WriteFile(filepath.Join(n.dockerDir(), "config.json"), []byte(conf), 0o600); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) dockerDir() string { return n.root + "/docker" }
