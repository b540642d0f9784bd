package cli_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"go.uber.org/goleak"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/cli"
	"github.com/cubesandbox/cubelet/internal/cubetest"
	"github.com/cubesandbox/cubelet/internal/server"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"cubecli": func() {
			os.Exit(cli.Main(cli.Env{Args: os.Args[1:], Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.Getenv}))
		},
	})
}

// serve runs a fake node until the test ends and returns its address.
func serve(t testing.TB, n *cubetest.Node) string {
	address, _ := serveUntil(t, n)
	return address
}

// serveNode is serve with other sandboxes.
func serveNode(t testing.TB, sandboxes cube.Sandboxes, n *cubetest.Node) string {
	address, _ := listen(t, sandboxes, n)
	return address
}

// serveUntil is serve with a function that stops the node earlier.
func serveUntil(t testing.TB, n *cubetest.Node) (address string, stop func()) {
	return listen(t, n.Sandboxes(), n)
}

func listen(t testing.TB, sandboxes cube.Sandboxes, n *cubetest.Node) (address string, stop func()) {
	t.Helper()
	dir, err := os.MkdirTemp("", "cubecli")
	if err != nil {
		t.Fatal(err)
	}
	l, err := server.ListenUnix(filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	handler := server.New(server.Config{
		Sandboxes: sandboxes, Templates: n.Templates(), Node: n.Node(), Log: log,
		Health: func(context.Context) error { return nil },
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- server.Serve(ctx, []net.Listener{l}, handler, log) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("serve: %v", err)
		}
		_ = os.RemoveAll(dir)
	})
	t.Cleanup(stop)
	return "unix://" + filepath.Join(dir, "s"), stop
}

func TestScripts(t *testing.T) {
	t.Cleanup(func() { goleak.VerifyNone(t) })
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		UpdateScripts:       os.Getenv("UPDATE_SCRIPTS") != "",
		Setup: func(env *testscript.Env) error {
			t := env.T().(testing.TB)
			n := cubetest.New(t)
			n.AddTemplate("tpl-12345", "tools")
			env.Setenv("CUBELET_ADDRESS", serve(t, n))
			env.Setenv("GUEST", n.GuestDir("s00001x"))
			env.Values["node"] = n
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"world":    world,
			"logs":     setLogs,
			"spec":     spec,
			"hang":     hang,
			"exitcode": exitCode,
		},
	})
}

// world prints what exists on the node: world FILE.
func world(ts *testscript.TestScript, _ bool, args []string) {
	n := ts.Value("node").(*cubetest.Node)
	ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(n.String()), 0o600))
}

// setLogs sets the console log to what a file holds: logs FILE.
func setLogs(ts *testscript.TestScript, _ bool, args []string) {
	ts.Value("node").(*cubetest.Node).SetLogs(ts.ReadFile(args[0]))
}

// spec checks the request that made a sandbox: spec ID WORD... must all occur in it.
func spec(ts *testscript.TestScript, _ bool, args []string) {
	s := ts.Value("node").(*cubetest.Node).Spec(args[0])
	text := specText(s)
	for _, w := range args[1:] {
		if !strings.Contains(text, w) {
			ts.Fatalf("%q is not in the spec: %s", w, text)
		}
	}
}

// hang makes a call wait until its context ends: hang CALL.
func hang(ts *testscript.TestScript, _ bool, args []string) {
	ts.Value("node").(*cubetest.Node).On(args[0], func(ctx context.Context) error {
		<-ctx.Done()
		return ctx.Err()
	})
}

// exitCode runs a program that must end with the code: exitcode CODE PROGRAM ARGUMENT...
func exitCode(ts *testscript.TestScript, _ bool, args []string) {
	err := ts.Exec(args[1], args[2:]...)
	var exit *exec.ExitError
	if !errors.As(err, &exit) || strconv.Itoa(exit.ExitCode()) != args[0] {
		ts.Fatalf("want exit code %s, have %v", args[0], err)
	}
}

func specText(s cube.SandboxSpec) string {
	b, err := json.Marshal(s)
	if err != nil {
		return err.Error()
	}
	return string(b)
}
