package server

import (
	"context"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/api/envd/filesystem/filesystemconnect"
)

const (
	// guestHeaderBytes bounds the header of a guest's answer.
	guestHeaderBytes = 64 << 10
	// guestHeaderTimeout bounds the wait for a guest's answer once it has the request.
	guestHeaderTimeout = 60 * time.Second
)

// guestProxy lets callers reach the files of a guest: /guest/SANDBOX/files and the calls
// of filesystem.Filesystem, nothing else of the agent. Bodies are streamed both ways
// without a size limit. A guest's answer is untrusted: only headers that describe a body
// are passed on.
type guestProxy struct {
	sandboxes cube.Sandboxes
	log       *slog.Logger
	errors    *connect.ErrorWriter
}

func newGuestProxy(cfg Config) *guestProxy {
	return &guestProxy{sandboxes: cfg.Sandboxes, log: cfg.Log, errors: connect.NewErrorWriter()}
}

func (g *guestProxy) register(mux *http.ServeMux) {
	mux.HandleFunc("/guest/", func(w http.ResponseWriter, r *http.Request) {
		g.refuse(w, r, cube.Errorf(cube.CodeNotFound, "no path %q below /guest/", r.URL.Path).
			WithHint("Only /guest/SANDBOX/files and /guest/SANDBOX/%s/METHOD exist.", filesystemconnect.FilesystemName))
	})
	mux.HandleFunc("GET /guest/{sandbox}/files", g.forward)
	mux.HandleFunc("POST /guest/{sandbox}/files", g.forward)
	mux.HandleFunc("POST /guest/{sandbox}/"+filesystemconnect.FilesystemName+"/{method}", g.forward)
}

// forward sends one request to the guest's agent over a connection of its own.
func (g *guestProxy) forward(w http.ResponseWriter, r *http.Request) {
	var c check
	c.ref("sandbox", r.PathValue("sandbox"))
	target, err := guestPath(r)
	if c.add(err); c.err != nil {
		g.refuse(w, r, c.err)
		return
	}
	conn, token, err := g.sandboxes.DialGuest(r.Context(), r.PathValue("sandbox"), cube.AgentPort)
	if err != nil {
		g.refuse(w, r, err)
		return
	}
	once := &oneConn{conn: conn}
	defer once.close()
	proxy := &httputil.ReverseProxy{
		Rewrite: func(pr *httputil.ProxyRequest) {
			pr.Out.URL = target
			pr.Out.Host = target.Host
			pr.Out.Header = pick(pr.In.Header, requestHeaders())
			pr.Out.Header.Set("X-Access-Token", token)
		},
		Transport:     g.transport(once),
		FlushInterval: -1,
		ErrorLog:      log.New(io.Discard, "", 0), // ErrorHandler has the error
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			g.refuse(w, r, guestFault(r.Context(), err))
		},
	}
	proxy.ServeHTTP(w, r)
}

// guestPath is the address that is asked of the agent. It is made of checked parts and
// never of the caller's path.
func guestPath(r *http.Request) (*url.URL, error) {
	u := &url.URL{Scheme: "http", Host: "guest", Path: "/files", RawQuery: r.URL.RawQuery}
	if method := r.PathValue("method"); method != "" {
		if strings.ContainsFunc(method, func(c rune) bool { return (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') }) {
			return nil, cube.Errorf(cube.CodeNotFound, "%s has no method %q", filesystemconnect.FilesystemName, method)
		}
		u.Path = "/" + filesystemconnect.FilesystemName + "/" + method
	}
	return u, nil
}

func (g *guestProxy) transport(c *oneConn) http.RoundTripper {
	return &guestTransport{http.Transport{
		DialContext:            c.dial,
		DisableKeepAlives:      true,
		DisableCompression:     true,
		MaxResponseHeaderBytes: guestHeaderBytes,
		ResponseHeaderTimeout:  guestHeaderTimeout,
		WriteBufferSize:        64 << 10,
		ReadBufferSize:         64 << 10,
	}}
}

// guestTransport passes on of an answer its status, its body and the headers that
// describe the body.
type guestTransport struct{ transport http.Transport }

// RoundTrip implements http.RoundTripper.
func (t *guestTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	res, err := t.transport.RoundTrip(r.WithContext(valueless{r.Context()}))
	if err != nil {
		return nil, err
	}
	if res.StatusCode < 200 {
		res.Body.Close()
		return nil, cube.Errorf(cube.CodeUnavailable, "the guest answered %d", res.StatusCode)
	}
	return &http.Response{
		Status:        res.Status,
		StatusCode:    res.StatusCode,
		Proto:         res.Proto,
		ProtoMajor:    res.ProtoMajor,
		ProtoMinor:    res.ProtoMinor,
		Header:        pick(res.Header, responseHeaders()),
		Body:          res.Body,
		ContentLength: res.ContentLength,
		Request:       res.Request,
	}, nil
}

// valueless hides the proxy's client trace, which would pass a guest's informational
// answers on as they are.
type valueless struct{ context.Context }

// Value implements context.Context.
func (valueless) Value(any) any { return nil }

func requestHeaders() []string {
	return []string{
		"Accept", "Accept-Encoding", "Authorization", "Connect-Protocol-Version", "Connect-Timeout-Ms",
		"Content-Encoding", "Content-Type", "If-Modified-Since", "If-None-Match", "If-Range", "Range", "User-Agent",
	}
}

func responseHeaders() []string {
	return []string{
		"Accept-Ranges", "Content-Disposition", "Content-Encoding", "Content-Length", "Content-Range",
		"Content-Type", "Etag", "Last-Modified", "Vary",
	}
}

// metadataHeader begins the headers that set a file's metadata on upload.
const metadataHeader = "X-Metadata-"

// pick copies the named headers, and those of a file's metadata.
func pick(h http.Header, names []string) http.Header {
	out := make(http.Header)
	for k, v := range h {
		if slices.Contains(names, k) || strings.HasPrefix(k, metadataHeader) {
			out[k] = v
		}
	}
	return out
}

// guestFault gives an error of the exchange with the guest its code.
func guestFault(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if cube.CodeOf(err) != cube.CodeInternal {
		return err
	}
	return (&cube.Error{Code: cube.CodeUnavailable, Op: "talk to the guest", Err: err}).
		WithHint("Look at the guest's console with `cubecli sandbox logs`.")
}

// refuse answers with an error in Connect's form, which is JSON for plain requests.
func (g *guestProxy) refuse(w http.ResponseWriter, r *http.Request, err error) {
	if cube.CodeOf(err) == cube.CodeInternal {
		g.log.ErrorContext(r.Context(), "call failed", "procedure", r.URL.Path, "error", err)
	}
	// The answer may already be under way; then the client sees it break off.
	_ = g.errors.Write(w, r, status(r.Context(), err))
}

// oneConn hands a connection to a transport once.
type oneConn struct {
	mu   sync.Mutex
	conn net.Conn
}

func (c *oneConn) take() net.Conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	conn := c.conn
	c.conn = nil
	return conn
}

func (c *oneConn) dial(context.Context, string, string) (net.Conn, error) {
	if conn := c.take(); conn != nil {
		return conn, nil
	}
	return nil, cube.Errorf(cube.CodeUnavailable, "the guest closed the connection")
}

// close closes the connection unless a transport took it, which then closes it.
func (c *oneConn) close() {
	if conn := c.take(); conn != nil {
		_ = conn.Close() // nothing was sent on it
	}
}
