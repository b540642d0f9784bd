package cli_test

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/agent"
	"github.com/cubesandbox/cubelet/internal/cubetest"
	"github.com/cubesandbox/cubelet/internal/guest"
)

// agentNode is a node whose only guest is the real agent, run by the test.
type agentNode struct {
	cube.Sandboxes
	address string
}

func (a agentNode) dial(ctx context.Context, _ int) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "tcp", a.address)
}

func (a agentNode) DialGuest(ctx context.Context, _ string, port int) (net.Conn, string, error) {
	conn, err := a.dial(ctx, port)
	return conn, "", err
}

func (a agentNode) Exec(ctx context.Context, _ string, spec cube.ExecSpec) (cube.ExecSession, error) {
	return guest.New(slog.New(slog.DiscardHandler)).Exec(ctx, a.dial, "", spec)
}

func serveAgent(t *testing.T) (address string) {
	t.Helper()
	srv, err := agent.New(agent.Config{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(ctx, l) // its end is asked for
	}()
	t.Cleanup(func() {
		cancel()
		<-done
		srv.Close()
	})
	n := cubetest.New(t)
	return serveNode(t, agentNode{n.Sandboxes(), l.Addr().String()}, n)
}

func TestRealAgent(t *testing.T) {
	address := serveAgent(t)
	cubecli := func(stdin string, args ...string) (string, int) {
		cmd := exec.CommandContext(t.Context(), "cubecli", append([]string{"--address", address, "sandbox"}, args...)...)
		cmd.Stdin = strings.NewReader(stdin)
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		return string(out), cmd.ProcessState.ExitCode()
	}
	t.Run("copies a tree there and back", func(t *testing.T) {
		dir := t.TempDir()
		err := errors.Join(
			os.MkdirAll(filepath.Join(dir, "src/sub"), 0o755), os.Mkdir(filepath.Join(dir, "guest"), 0o755),
			os.WriteFile(filepath.Join(dir, "src/run.sh"), []byte("#!/bin/sh\n"), 0o755),
			os.WriteFile(filepath.Join(dir, "src/sub/deep"), []byte("deep"), 0o600),
			os.Symlink("../run.sh", filepath.Join(dir, "src/sub/link")))
		if err != nil {
			t.Fatal(err)
		}
		if out, code := cubecli("", "cp", filepath.Join(dir, "src"), "s1:"+filepath.Join(dir, "guest")); code != 0 || out != "" {
			t.Fatalf("up: %d %s", code, out)
		}
		if out, code := cubecli("", "cp", "s1:"+filepath.Join(dir, "guest/src"), filepath.Join(dir, "back")); code != 0 || out != "" {
			t.Fatalf("down: %d %s", code, out)
		}
		for _, p := range []string{"guest/src", "back"} {
			run, err := os.Stat(filepath.Join(dir, p, "run.sh"))
			if err != nil || run.Mode().Perm() != 0o755 {
				t.Errorf("%s: %v, %v", p, run, err)
			}
			deep, err := os.Stat(filepath.Join(dir, p, "sub/deep"))
			if err != nil || deep.Mode() != fs.FileMode(0o600) || deep.Size() != 4 {
				t.Errorf("%s: %v, %v", p, deep, err)
			}
			if to, err := os.Readlink(filepath.Join(dir, p, "sub/link")); to != "../run.sh" {
				t.Errorf("%s: %q, %v", p, to, err)
			}
		}
	})
	for name, tt := range map[string]struct {
		stdin string
		args  []string
		out   string
		code  int
	}{
		"passes input and output":     {"abc", []string{"exec", "-i", "s1", "wc", "-c"}, "3\n", 0},
		"passes the exit code":        {"", []string{"exec", "s1", "--", "sh", "-c", "exit 9"}, "", 9},
		"reports a signal":            {"", []string{"exec", "s1", "--", "sh", "-c", "kill -9 $$"}, "", 137},
		"ends at the deadline":        {"", []string{"exec", "--timeout", "100ms", "s1", "sleep", "60"}, "cubecli: the program was ended: deadline exceeded\n", 137},
		"gives a terminal its size":   {"", []string{"exec", "-t", "s1", "stty", "size"}, "24 80\r\n", 0},
		"names a missing program":     {"", []string{"exec", "s1", "/none"}, "Error: exec: start /none: no such file or directory (InvalidArgument)\n", 125},
		"names a missing user":        {"", []string{"cp", "--user", "nobody1", "s1:/etc/passwd", "-"}, "Error: copy: invalid username: 'nobody1' (Unauthenticated)\n", 9},
		"names a missing file":        {"", []string{"cp", "s1:/none", "-"}, "Error: copy: s1:/none does not exist (NotFound)\n", 3},
		"takes no more than it wants": {strings.Repeat("y\n", 1<<20), []string{"exec", "-i", "s1", "head", "-n", "1"}, "y\n", 0},
	} {
		t.Run(name, func(t *testing.T) {
			if out, code := cubecli(tt.stdin, tt.args...); code != tt.code || out != tt.out {
				t.Errorf("%d %q", code, out)
			}
		})
	}
}
