package guest

import (
	"context"
	"log/slog"
	"net"
	"testing"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/agent"
	"github.com/cubesandbox/cubelet/internal/guestapi"
)

func TestQuick(t *testing.T) {
	s, err := agent.New(agent.Config{Log: slog.Default()})
	if err != nil { t.Fatal(err) }
	l, _ := net.Listen("tcp", "127.0.0.1:0")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- s.Serve(ctx, l) }()
	dial := func(ctx context.Context, _ int) (net.Conn, error) { var d net.Dialer; return d.DialContext(ctx, "tcp", l.Addr().String()) }
	c := New(slog.Default())
	if err := c.Init(ctx, dial, guestapi.Init{SandboxID: "x", AccessToken: "tok", Env: map[string]string{"A": "b"}, Cmd: []string{"sh", "-c", "echo def"}}); err != nil { t.Fatal(err) }
	for _, a := range [][]string{{"sh", "-c", "echo hi; echo err >&2; env; exit 3"}, nil, {"sleep", "100"}, {"sh", "-c", "kill -9 $$"}, {"sh", "-c", "(sleep 5; echo x)& echo main"}} {
		at := time.Now()
		o, e, x, err := c.Run(ctx, dial, "tok", cube.ExecSpec{Args: a, Timeout: 300 * time.Millisecond})
		t.Logf("%v: %q %q %d %v %v", a, o, e, x, err, time.Since(at))
	}
	_, _, _, err = c.Run(ctx, dial, "bad", cube.ExecSpec{Args: []string{"true"}})
	t.Log(err)
	o, _, x, err := c.Run(ctx, dial, "tok", cube.ExecSpec{Args: []string{"sh", "-c", "tty; stty size; echo $TERM"}, TTY: &cube.WindowSize{Cols: 80, Rows: 25}})
	t.Logf("%q %d %v", o, x, err)
	_, _, _, err = c.Run(ctx, dial, "tok", cube.ExecSpec{Args: []string{"true"}, User: "nobodyx"})
	t.Log(err)
	_, _, _, err = c.Run(ctx, dial, "tok", cube.ExecSpec{Args: []string{"truexx"}, User: "nobody"})
	t.Log(err)
	o, _, _, err = c.Run(ctx, dial, "tok", cube.ExecSpec{Args: []string{"id"}, User: "nobody"})
	t.Log(string(o), err)
	cancel()
	<-done
	s.Close()
}
