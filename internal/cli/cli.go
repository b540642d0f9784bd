// Package cli is cubecli, the command line of a node: one verb per file. It talks to the
// API of api/cube/v1 and decides nothing that the node decides.
package cli

import (
	"context"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"
)

// Env is what a run of cubecli touches of its process.
type Env struct {
	Args   []string // without the program's name
	Stdin  *os.File
	Stdout *os.File
	Stderr *os.File
	Getenv func(string) string
}

// Main runs cubecli and returns its exit code. It writes errors to Stderr.
func Main(env Env) int {
	a := &app{stdin: env.Stdin, stdout: env.Stdout, stderr: env.Stderr, getenv: env.Getenv}
	root := a.root()
	root.SetArgs(env.Args)
	root.SetIn(env.Stdin)
	root.SetOut(env.Stdout)
	root.SetErr(env.Stderr)
	err := root.ExecuteContext(context.Background())
	if a.client != nil {
		a.client.close()
	}
	return report(env.Stderr, err)
}

// app is one run of cubecli: its streams and the global flags.
type app struct {
	stdin  *os.File
	stdout *os.File
	stderr *os.File
	getenv func(string) string

	address  string
	tlsCert  string
	tlsKey   string
	tlsCA    string
	format   string
	quiet    bool
	deadline time.Duration

	client *client // made by dial
}

// call returns the context of a command's calls: it ends with --deadline and when the
// user interrupts.
func (a *app) call(cmd *cobra.Command) (context.Context, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	if a.deadline <= 0 {
		return ctx, stop
	}
	ctx, cancel := context.WithTimeout(ctx, a.deadline)
	return ctx, func() { cancel(); stop() }
}

// isTerminal reports whether f is a terminal.
func isTerminal(f *os.File) bool { return f != nil && term.IsTerminal(int(f.Fd())) }

// text returns a writer for text that a guest or another user may have chosen: on a
// terminal it shows control characters instead of obeying them.
func (a *app) text(f *os.File) io.Writer {
	if isTerminal(f) {
		return &cleanWriter{w: f}
	}
	return f
}
