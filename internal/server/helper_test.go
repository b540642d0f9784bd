package server

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"connectrpc.com/connect"
	"go.uber.org/goleak"

	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
	"github.com/cubesandbox/cubelet/api/cube/v1/cubev1connect"
	"github.com/cubesandbox/cubelet/internal/cubetest"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == "connect-to" {
		os.Exit(connectTo(os.Args[2]))
	}
	goleak.VerifyTestMain(m)
}

// buffer is a log that tests can read.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// rig is a server on a unix socket before a fake node.
type rig struct {
	node      *cubetest.Node
	handler   http.Handler
	log       *buffer
	socket    string
	health    error
	http      *http.Client // speaks HTTP/2
	http1     *http.Client
	sandboxes cubev1connect.SandboxServiceClient
	templates cubev1connect.TemplateServiceClient
}

const base = "http://cubelet"

func newRig(t *testing.T) *rig {
	t.Helper()
	dir, err := os.MkdirTemp("", "cube")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	r := &rig{node: cubetest.New(t), log: &buffer{}, socket: filepath.Join(dir, "s")}
	l, err := ListenUnix(r.socket)
	if err != nil {
		t.Fatal(err)
	}
	r.handler = New(Config{
		Sandboxes: r.node.Sandboxes(), Templates: r.node.Templates(), Node: r.node.Node(),
		Health: func(context.Context) error { return r.health },
		Log:    slog.New(slog.NewTextHandler(r.log, nil)),
	})
	run(t, []net.Listener{l}, r.handler)
	r.http, r.http1 = r.client(t, true), r.client(t, false)
	r.sandboxes = cubev1connect.NewSandboxServiceClient(r.http, base)
	r.templates = cubev1connect.NewTemplateServiceClient(r.http, base)
	return r
}

// run serves until the end of the test.
func run(t *testing.T, listeners []net.Listener, h http.Handler) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, listeners, h, quiet()) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
}

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

func (r *rig) client(t *testing.T, h2 bool) *http.Client {
	var p http.Protocols
	p.SetHTTP1(!h2)
	p.SetUnencryptedHTTP2(h2)
	tr := &http.Transport{Protocols: &p, DisableCompression: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", r.socket)
	}}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

func (r *rig) create(t *testing.T, req *cubev1.CreateSandboxRequest) *cubev1.Sandbox {
	t.Helper()
	if req.GetTemplateId() == "" {
		req.TemplateId = "base"
	}
	res, err := r.sandboxes.CreateSandbox(t.Context(), connect.NewRequest(req))
	if err != nil {
		t.Fatal(err)
	}
	return res.Msg.GetSandbox()
}

// want checks an error's code, reason and field.
func want(t *testing.T, err error, code connect.Code, reason, field string) *cubev1.ErrorDetail {
	t.Helper()
	if connect.CodeOf(err) != code {
		t.Fatalf("want %v, have %v", code, err)
	}
	d := detailOf(err)
	if d == nil {
		t.Fatalf("no detail in %v", err)
	}
	if d.GetReason() != reason || d.GetField() != field {
		t.Fatalf("want reason %q and field %q, have %v", reason, field, d)
	}
	return d
}

func detailOf(err error) *cubev1.ErrorDetail {
	var ce *connect.Error
	if !errors.As(err, &ce) {
		return nil
	}
	for _, d := range ce.Details() {
		if v, err := d.Value(); err == nil {
			if e, ok := v.(*cubev1.ErrorDetail); ok {
				return e
			}
		}
	}
	return nil
}
