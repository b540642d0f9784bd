package guest

import (
	"context"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/agent/wire"
	"github.com/cubesandbox/cubelet/internal/guestapi"
)

// guestThatSays returns a dialer to a guest that answers every call with b.
func guestThatSays(b []byte) guestapi.Dialer {
	return func(context.Context, int) (net.Conn, error) {
		host, guest := net.Pipe()
		go io.Copy(io.Discard, guest)
		go func() {
			_, _ = guest.Write(b)
			_ = guest.Close()
		}()
		return host, nil
	}
}

func frames(list ...[]byte) (b []byte) {
	for _, f := range list {
		b = append(b, f...)
	}
	return b
}

func frame(k wire.Kind, payload []byte) []byte { return wire.AppendFrame(nil, k, payload) }

func TestHostileGuestsEndTheSessionOnly(t *testing.T) {
	started := frame(wire.KindStarted, wire.EncodeNumber(1))
	fault := wire.Error{Code: wire.CodeInvalid, Message: "\x1b[31m" + strings.Repeat("x", 100000)}
	end := wire.End{Code: 1 << 30, Signal: true, Reason: "\n"}
	for name, b := range map[string][]byte{
		"silence":          nil,
		"no start":         frame(wire.KindStdout, []byte("x")),
		"zero pid":         frame(wire.KindStarted, wire.EncodeNumber(0)),
		"huge frame":       {0xff, 0xff, 0xff, 0xff, byte(wire.KindStdout)},
		"early end":        started,
		"unknown frame":    frames(started, frame(99, nil)),
		"huge later frame": frames(started, []byte{0xff, 0, 0, 0, 1}),
		"unearned credit":  frames(started, frame(wire.KindAck, wire.EncodeNumber(1<<63))),
		"malformed end":    frames(started, frame(wire.KindEnd, []byte{1})),
		"error":            frame(wire.KindError, fault.Encode()),
		"malformed error":  frames(started, frame(wire.KindError, []byte{1, 2})),
		"strange end":      frames(started, frame(wire.KindEnd, end.Encode())),
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		_, _, code, err := newClient().Run(ctx, guestThatSays(b), "", cube.ExecSpec{Args: []string{"x"}})
		cancel()
		if err == nil {
			t.Errorf("%s: exit code %d and no error", name, code)
			continue
		}
		if text := err.Error(); len(text) > 2*maxText || strings.ContainsAny(text, "\x1b\n") {
			t.Errorf("%s: error %q", name, text)
		}
	}
}

func FuzzSession(f *testing.F) {
	end := wire.End{Code: 3}
	f.Add(frames(frame(wire.KindStarted, wire.EncodeNumber(7)), frame(wire.KindStdout, []byte("x")), frame(wire.KindAck, wire.EncodeNumber(1)), frame(wire.KindEnd, end.Encode())))
	f.Fuzz(func(t *testing.T, b []byte) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		s, err := newClient().Exec(ctx, guestThatSays(b), "", cube.ExecSpec{Args: []string{"x"}, Stdin: true})
		if err != nil {
			return
		}
		defer s.Close()
		for {
			ev, err := s.Recv()
			if err != nil {
				return
			}
			if ev.Exit != nil && (ev.Exit.Code < 0 || ev.Exit.Code > 255) {
				t.Errorf("exit code %d", ev.Exit.Code)
			}
		}
	})
}

func FuzzErrorAnswers(f *testing.F) {
	f.Add(401, []byte(`{"code":401,"message":"no\n"}`))
	f.Fuzz(func(t *testing.T, status int, body []byte) {
		if text := messageOf(status, body); text == "" || strings.ContainsAny(text, "\n\x1b") {
			t.Errorf("%q", text)
		}
	})
}
