package cli_test

import (
	"context"
	"io"
	"log/slog"
	"net"
	"os/exec"
	"strings"
	"testing"

	"github.com/cubesandbox/cubelet/internal/cubetest"
	"github.com/cubesandbox/cubelet/internal/server"
)

func TestNodeOnTheNetwork(t *testing.T) {
	ours, theirs := cubetest.NewAuthority(t, "ours"), cubetest.NewAuthority(t, "theirs")
	ours.IssueServer("server")
	ours.IssueClient("client")
	theirs.IssueClient("client")
	l, err := server.ListenTLS("localhost:0", ours.File("server.crt"), ours.File("server.key"), ours.File("ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	n := cubetest.New(t)
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- server.Serve(ctx, []net.Listener{l}, server.New(server.Config{
			Sandboxes: n.Sandboxes(), Templates: n.Templates(), Node: n.Node(), Log: log,
			Health: func(context.Context) error { return nil },
		}), log)
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	address := l.Addr().String()
	cubecli := func(ca, client *cubetest.Authority, args ...string) (string, int) {
		flags := []string{"--address", address, "--tls-ca", ca.File("ca.crt"), "--tls-cert", client.File("client.crt"), "--tls-key", client.File("client.key")}
		cmd := exec.CommandContext(t.Context(), "cubecli", append(flags, args...)...)
		out, _ := cmd.CombinedOutput() // the exit code tells
		return string(out), cmd.ProcessState.ExitCode()
	}
	if out, code := cubecli(ours, ours, "sandbox", "create", "--template-id", "base"); code != 0 || out != "s00001x\n" {
		t.Errorf("create: %d %s", code, out)
	}
	if out, code := cubecli(ours, ours, "sandbox", "exec", "s00001x", "--", "sh", "-c", "echo hi; exit 3"); code != 3 || out != "hi\n" {
		t.Errorf("exec: %d %s", code, out)
	}
	if out, code := cubecli(theirs, ours, "node", "status"); code != 7 || !strings.Contains(out, "certificate") {
		t.Errorf("unknown server: %d %s", code, out)
	}
	if out, code := cubecli(ours, theirs, "node", "status"); code != 7 || !strings.Contains(out, "certificate") {
		t.Errorf("unknown client: %d %s", code, out)
	}
}
