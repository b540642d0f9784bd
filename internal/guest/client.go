// Package guest is the host's side of the guest agent: it tells a guest who it is and
// runs programs in it.
//
// What a guest answers is written by whoever runs in it. Every message, header and text
// is bounded, nothing is buffered without a limit, and every wait ends with its context.
package guest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/agent/wire"
	"github.com/cubesandbox/cubelet/internal/guestapi"
)

// Bounds of what a guest may send, in bytes.
const (
	maxHeader = 64 << 10 // the header of an answer
	maxText   = 1 << 10  // an error message
)

// baseURL names no host that is ever looked up: the dialer decides where a call goes.
const baseURL = "http://guest"

// tokenHeader carries the access token.
const tokenHeader = "X-Access-Token"

// Client talks to guest agents. It keeps no connection between calls and is safe for
// concurrent use.
type Client struct {
	log *slog.Logger
}

// New returns a client.
func New(log *slog.Logger) *Client { return &Client{log: log} }

// Transport sends requests to the agent that dial reaches, for proxies. The headers of
// its answers are bounded; their bodies are the caller's to bound.
func (c *Client) Transport(dial guestapi.Dialer) http.RoundTripper {
	return newTransport(dial)
}

func newTransport(dial guestapi.Dialer) *http.Transport {
	return &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dial(ctx, cube.AgentPort)
		},
		DisableCompression:     true,
		MaxResponseHeaderBytes: maxHeader,
		DisableKeepAlives:      true,
	}
}

// Init identifies the sandbox to its agent, which may still be waking up: it is tried
// until ctx ends. Codes: PermissionDenied (the agent has another token), Internal (the
// guest refuses), DeadlineExceeded, Canceled.
func (c *Client) Init(ctx context.Context, dial guestapi.Dialer, in guestapi.Init) error {
	msg := initMessage(in)
	request := wire.AppendFrame([]byte{wire.Magic}, wire.KindInit, msg.Encode())
	return c.retry(ctx, "init guest", func(ctx context.Context) error {
		return initOnce(ctx, dial, request)
	})
}

func initOnce(ctx context.Context, dial guestapi.Dialer, request []byte) error {
	conn, stop, err := open(ctx, dial, request)
	if err != nil {
		return err
	}
	defer stop()
	frames := wire.Reader{R: conn, Max: wire.MaxReply}
	kind, payload, err := frames.Next()
	switch {
	case err != nil:
		return unreachable(ctx, err)
	case kind == wire.KindError:
		return agentError(payload)
	case kind != wire.KindOK:
		return cube.Errorf(cube.CodeInternal, "the guest agent answered init with a frame of kind %d", kind)
	}
	return nil
}

func initMessage(in guestapi.Init) wire.Init {
	at := in.Time
	if at.IsZero() {
		at = time.Now()
	}
	return wire.Init{
		Token: in.AccessToken, UnixNano: at.UnixNano(), Env: in.Env, User: in.User, Workdir: in.Workdir,
		SandboxID: in.SandboxID, TemplateID: in.TemplateID, Hostname: in.Hostname, MachineID: in.MachineID, Entropy: in.Entropy,
		Address: in.Address, Gateway: in.Gateway, Nameservers: in.Nameservers, Entrypoint: in.Entrypoint, Cmd: in.Cmd, PresentedToken: in.PresentedToken,
	}
}

// open connects to the agent and sends the request. The connection is closed by stop and
// when ctx ends.
func open(ctx context.Context, dial guestapi.Dialer, request []byte) (conn net.Conn, stop func(), err error) {
	conn, err = dial(ctx, cube.AgentPort)
	if err != nil {
		return nil, nil, unreachable(ctx, err)
	}
	unlink := context.AfterFunc(ctx, func() { conn.Close() })
	stop = func() {
		unlink()
		conn.Close()
	}
	if _, err := conn.Write(request); err != nil {
		stop()
		return nil, nil, unreachable(ctx, err)
	}
	return conn, stop, nil
}

// agentError decodes the payload of an error frame.
func agentError(payload []byte) error {
	var m wire.Error
	if err := m.Decode(payload); err != nil {
		return cube.Errorf(cube.CodeInternal, "the guest agent sent an error that cannot be read: %w", err)
	}
	e := &cube.Error{Code: cube.CodeInternal, Err: errors.New(clean(m.Message))}
	switch m.Code {
	case wire.CodeInvalid:
		e.Code = cube.CodeInvalid
	case wire.CodeUser:
		e.Code, e.Field = cube.CodeInvalid, "user"
	case wire.CodeToken:
		e.Code = cube.CodePermissionDenied
	case wire.CodeSlow:
		e.Code = cube.CodeResourceExhausted
	case wire.CodeInternal:
	}
	return e
}

// Health reports whether the agent answers. It is tried once.
func (c *Client) Health(ctx context.Context, dial guestapi.Dialer) error {
	return call(ctx, dial, request{method: http.MethodGet, path: "/health"})
}

// Shutdown makes the guest end its programs, clean its disks and power itself off. It
// returns when the guest has agreed; the end of the VMM tells that it is done.
func (c *Client) Shutdown(ctx context.Context, dial guestapi.Dialer, token string) error {
	return call(ctx, dial, request{method: http.MethodPost, path: "/shutdown", token: token})
}

// Times of the attempts to reach a guest that does not answer yet. An attempt may be
// lost for good, for example when its packets reached a guest without a network, so
// each ends by itself, later ones later.
const (
	firstRetry   = 2 * time.Millisecond // pause after the first attempt
	lastRetry    = 100 * time.Millisecond
	firstAttempt = 2 * time.Second // longest duration of the first attempt
	lastAttempt  = 30 * time.Second
)

// retry repeats attempt while the guest cannot be reached. The last reason is part of
// the error when ctx ends.
func (c *Client) retry(ctx context.Context, op string, attempt func(context.Context) error) error {
	limit := firstAttempt
	for wait := firstRetry; ; wait = min(2*wait, lastRetry) {
		one, cancel := context.WithTimeout(ctx, limit)
		err := attempt(one)
		timedOut := one.Err() != nil
		cancel()
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return &cube.Error{Code: cube.CodeOf(ctx.Err()), Op: op, Err: err}
		case timedOut:
			limit = min(2*limit, lastAttempt)
		case cube.CodeOf(err) != cube.CodeUnavailable:
			return fmt.Errorf("%s: %w", op, err)
		}
		c.log.Debug("guest not reached yet", "op", op, "err", err)
		select {
		case <-ctx.Done():
			return &cube.Error{Code: cube.CodeOf(ctx.Err()), Op: op, Err: fmt.Errorf("%w; last: %w", ctx.Err(), err)}
		case <-time.After(wait):
		}
	}
}

// request is one plain HTTP call whose answer has no content.
type request struct {
	method, path, token string
	body                []byte
}

// call sends r over a connection of its own.
func call(ctx context.Context, dial guestapi.Dialer, r request) error {
	req, err := http.NewRequestWithContext(ctx, r.method, baseURL+r.path, bytes.NewReader(r.body))
	if err != nil {
		return err
	}
	if r.token != "" {
		req.Header.Set(tokenHeader, r.token)
	}
	res, err := newTransport(dial).RoundTrip(req)
	if err != nil {
		return unreachable(ctx, err)
	}
	defer res.Body.Close()
	text, _ := io.ReadAll(io.LimitReader(res.Body, 4*maxText))
	if res.StatusCode/100 == 2 {
		return nil
	}
	return &cube.Error{Code: codeOfStatus(res.StatusCode), Err: errors.New(messageOf(res.StatusCode, text))}
}

// unreachable classifies an error of a call that got no answer.
func unreachable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return &cube.Error{Code: cube.CodeOf(ctx.Err()), Err: fmt.Errorf("%w: %w", ctx.Err(), err)}
	}
	return &cube.Error{Code: cube.CodeUnavailable, Err: err}
}

func codeOfStatus(status int) cube.Code {
	switch status {
	case http.StatusBadRequest, http.StatusMethodNotAllowed, http.StatusRequestEntityTooLarge:
		return cube.CodeInvalid
	case http.StatusUnauthorized, http.StatusForbidden:
		return cube.CodePermissionDenied
	case http.StatusNotFound:
		return cube.CodeNotFound
	case http.StatusNotImplemented:
		return cube.CodeUnimplemented
	case http.StatusInsufficientStorage:
		return cube.CodeNoSpace
	}
	return cube.CodeInternal
}

// messageOf returns the text of an error answer.
func messageOf(status int, body []byte) string {
	var e struct {
		Message string `json:"message"`
	}
	if json.Unmarshal(body, &e) != nil || e.Message == "" {
		return fmt.Sprintf("the guest agent answered %d", status)
	}
	return clean(e.Message)
}

// clean makes a guest's text fit for a log and a terminal.
func clean(s string) string {
	if len(s) > maxText {
		s = s[:maxText] + "…"
	}
	out := []rune(s)
	for i, r := range out {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			out[i] = '?'
		}
	}
	return string(out)
}
