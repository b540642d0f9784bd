package server

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	cube "github.com/cubesandbox/cubelet"
	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
	"github.com/cubesandbox/cubelet/api/envd/filesystem"
	"github.com/cubesandbox/cubelet/api/envd/filesystem/filesystemconnect"
	"github.com/cubesandbox/cubelet/internal/cubetest"
)

func get(t *testing.T, c *http.Client, method, url string, body io.Reader) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Access-Token", "forged")
	res, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res, string(b)
}

func TestGuestFilesPassBothWays(t *testing.T) {
	r := newRig(t)
	id := r.create(t, &cubev1.CreateSandboxRequest{}).GetId()
	for name, c := range map[string]*http.Client{"HTTP/1.1": r.http1, "HTTP/2": r.http} {
		t.Run(name, func(t *testing.T) {
			data := make([]byte, 5<<20)
			_, _ = rand.Read(data)
			res, body := get(t, c, "POST", base+"/guest/"+id+"/files?path=/a%20b", io.MultiReader(strings.NewReader(string(data))))
			if res.StatusCode != 200 {
				t.Fatalf("%s %s", res.Status, body)
			}
			res, body = get(t, c, "GET", base+"/guest/"+id+"/files?path=/a%20b", nil)
			if res.StatusCode != 200 || body != string(data) {
				t.Fatalf("%s, %d bytes", res.Status, len(body))
			}
			if res.ContentLength != int64(len(data)) || res.Header.Get("Set-Cookie") != "" {
				t.Errorf("length %d, header %v", res.ContentLength, res.Header)
			}
			res, body = get(t, c, "GET", base+"/guest/"+id+"/files?path=/none", nil)
			if res.StatusCode != 404 || !strings.Contains(body, `"code":404`) {
				t.Errorf("%s %s", res.Status, body)
			}
		})
	}
	fs := filesystemconnect.NewFilesystemClient(r.http, base+"/guest/"+id)
	st, err := fs.Stat(t.Context(), connect.NewRequest(&filesystem.StatRequest{Path: "/a b"}))
	if err != nil || st.Msg.GetEntry().GetSize() != 5<<20 {
		t.Errorf("stat %v, %v", st, err)
	}
}

func TestOnlyFilesOfTheAgentCanBeReached(t *testing.T) {
	r := newRig(t)
	id := r.create(t, &cubev1.CreateSandboxRequest{}).GetId()
	for _, path := range []string{
		"/init", "/shutdown", "/health", "/envs", "/process.Process/Start", "/files/compose", "/files/../init", "/files/..%2finit",
		"/files%2f..%2finit", "/filesystem.Filesystem/", "/filesystem.Filesystem/a%2f..%2f..%2finit", "/filesystem.Filesystem/..", "//init", "/", "",
	} {
		for _, method := range []string{"GET", "POST", "DELETE"} {
			res, body := get(t, r.http1, method, base+"/guest/"+id+path, nil)
			if res.StatusCode != 404 {
				t.Errorf("%s %s: %s %s", method, path, res.Status, body)
			}
		}
	}
}

func TestGuestErrorsHaveTheFormOfConnect(t *testing.T) {
	r := newRig(t)
	r.node.On("dial", nil)
	res, body := get(t, r.http1, "GET", base+"/guest/nope/files?path=/x", nil)
	if res.StatusCode != 404 || !strings.Contains(body, `"code":"not_found"`) || !strings.Contains(body, "cube.v1.ErrorDetail") {
		t.Errorf("%s %s", res.Status, body)
	}
	r.node.On("dial", func(context.Context) error { return errors.New("namespace lost") })
	if res, body = get(t, r.http1, "POST", base+"/guest/nope/files?path=/x", strings.NewReader("x")); res.StatusCode != 500 {
		t.Errorf("%s %s", res.Status, body)
	}
	if !strings.Contains(r.log.String(), "namespace lost") {
		t.Errorf("the log lacks the internal error:\n%s", r.log)
	}
	fs := filesystemconnect.NewFilesystemClient(r.http, base+"/guest/nope", connect.WithGRPC())
	r.node.On("dial", func(context.Context) error { return cube.Errorf(cube.CodeFailedPrecondition, "paused") })
	_, err := fs.Stat(t.Context(), connect.NewRequest(&filesystem.StatRequest{Path: "/"}))
	if connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Errorf("error %v", err)
	}
}

// hostile is a node whose guest answers with raw bytes.
type hostile struct {
	cube.Sandboxes
	answer func(net.Conn)
}

func (h hostile) DialGuest(context.Context, string, int) (net.Conn, string, error) {
	ours, theirs := net.Pipe()
	go func() {
		defer theirs.Close()
		if _, err := http.ReadRequest(bufio.NewReader(theirs)); err != nil {
			return
		}
		h.answer(theirs)
	}()
	return ours, "token", nil
}

func TestHostileGuestAnswers(t *testing.T) {
	n := cubetest.New(t)
	text := func(s string) func(net.Conn) { return func(c net.Conn) { _, _ = io.WriteString(c, s) } }
	for name, tt := range map[string]struct {
		answer func(net.Conn)
		status int // 0: the answer breaks off
	}{
		"nothing":        {text(""), 503},
		"no HTTP":        {text("SSH-2.0-x\r\n"), 503},
		"huge header":    {text("HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 1<<20)), 503},
		"switch":         {text("HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"), 503},
		"short body":     {text("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"), 0},
		"bad chunk":      {text("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), 0},
		"endless hints":  {func(c net.Conn) { hints(c) }, 503},
		"evil headers":   {text("HTTP/1.1 200 OK\r\nSet-Cookie: a=b\r\nConnection: X-Y\r\nX-Y: 1\r\nServer: s\r\nLocation: /\r\nContent-Length: 0\r\n\r\n"), 200},
		"evil trailer":   {text("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: Set-Cookie\r\n\r\n0\r\nSet-Cookie: a=b\r\n\r\n"), 200},
		"unasked second": {text("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"), 200},
	} {
		t.Run(name, func(t *testing.T) {
			srv := httptest.NewServer(New(Config{Sandboxes: hostile{n.Sandboxes(), tt.answer}, Templates: n.Templates(), Node: n.Node(), Log: quiet()}))
			defer srv.Close()
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, srv.URL+"/guest/s1/files?path=/x", nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Connection", "Upgrade")
			req.Header.Set("Upgrade", "websocket")
			res, err := srv.Client().Do(req)
			if err != nil {
				if tt.status != 0 {
					t.Fatal(err)
				}
				return // it broke off at once
			}
			defer res.Body.Close()
			_, err = io.ReadAll(res.Body)
			if tt.status == 0 && err == nil {
				t.Error("a broken answer looks whole")
			}
			if tt.status != 0 && (res.StatusCode != tt.status || err != nil) {
				t.Errorf("%s, %v", res.Status, err)
			}
			for _, h := range []string{"Set-Cookie", "X-Y", "Server", "Location", "Link", "Trailer"} {
				if res.Header.Get(h) != "" || res.Trailer.Get(h) != "" {
					t.Errorf("%s passed", h)
				}
			}
		})
	}
}

func hints(c net.Conn) {
	for {
		if _, err := io.WriteString(c, "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"); err != nil {
			return
		}
	}
}

func TestGuestBodiesAreNotBuffered(t *testing.T) {
	n := cubetest.New(t)
	next := make(chan struct{})
	srv := httptest.NewServer(New(Config{Templates: n.Templates(), Node: n.Node(), Log: quiet(), Sandboxes: hostile{n.Sandboxes(), func(c net.Conn) {
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
		for i := range 3 {
			_, _ = fmt.Fprintf(c, "1\r\n%d\r\n", i)
			<-next
		}
		_, _ = io.WriteString(c, "0\r\n\r\n")
	}}}))
	defer srv.Close()
	client := srv.Client()
	client.Timeout = 20 * time.Second
	res, err := client.Get(srv.URL + "/guest/s1/files?path=/x")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	for i := range 3 {
		b := make([]byte, 1)
		if _, err := io.ReadFull(res.Body, b); err != nil || b[0] != byte('0'+i) {
			t.Fatalf("byte %d: %q, %v", i, b, err)
		}
		next <- struct{}{}
	}
}

func TestClientThatLeavesEndsTheTransfer(t *testing.T) {
	n := cubetest.New(t)
	ended := make(chan struct{})
	srv := httptest.NewServer(New(Config{Templates: n.Templates(), Node: n.Node(), Log: quiet(), Sandboxes: hostile{n.Sandboxes(), func(c net.Conn) {
		defer close(ended)
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
		for {
			if _, err := c.Write(make([]byte, 1000)); err != nil {
				return
			}
		}
	}}}))
	defer srv.Close()
	res, err := srv.Client().Get(srv.URL + "/guest/s1/files?path=/x")
	if err != nil {
		t.Fatal(err)
	}
	_ = res.Body.Close()
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Error("the guest is still being read")
	}
}
