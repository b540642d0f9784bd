package cli

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	cube "github.com/cubesandbox/cubelet"
	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

type execFlags struct {
	interactive bool
	tty         bool
	env         []string
	envFile     []string
	cwd         string
	user        string
	timeout     time.Duration
}

func (a *app) sandboxExec() *cobra.Command {
	var o execFlags
	cmd := &cobra.Command{
		Use:   "exec [flags] SANDBOX [--] [PROGRAM [ARGUMENT...]]",
		Short: "Run a program in a sandbox",
		Long: `Run a program in a sandbox; without PROGRAM, the image's entrypoint and command. Flags
of cubecli come before SANDBOX.

The exit code is the program's own, 128 plus the number of a signal that killed it, or
125 when the program could not be run. Signals are forwarded to the program. When cubecli
itself is killed, or loses the node, the program lives on.`,
		Example: `  cubecli sandbox exec s3k2 -- python3 -c 'print(6*7)'
  cubecli sandbox exec -it s3k2 bash
  tar c src | cubecli sandbox exec -i --cwd /work s3k2 tar x
  cubecli sandbox exec --user root --timeout 1m s3k2 -- apt-get update`,
		Args: args(cobra.MinimumNArgs(1)),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, text string) ([]cobra.Completion, cobra.ShellCompDirective) {
			return a.completeSandboxes(1)(cmd, args, text)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			err := during("exec", a.runExec(cmd, o, args[0], args[1:]))
			if err == nil {
				return nil
			}
			return &coded{err, exitExecFailure}
		},
	}
	f := cmd.Flags()
	f.SetInterspersed(false)
	f.BoolVarP(&o.interactive, "interactive", "i", false, "connect standard input")
	f.BoolVarP(&o.tty, "tty", "t", false, "give the program a terminal")
	f.StringArrayVarP(&o.env, "env", "e", nil, "environment `NAME=VALUE` (repeatable)")
	f.StringArrayVar(&o.envFile, "env-file", nil, "`FILE` with a line NAME=VALUE per variable (repeatable)")
	f.StringVarP(&o.cwd, "cwd", "w", "", "working `DIRECTORY` (default: the image's, else the user's home)")
	f.StringVarP(&o.user, "user", "u", "", "`USER` to run as (default: the image's)")
	f.DurationVar(&o.timeout, "timeout", 0, "kill the program after this time (0: never)")
	return cmd
}

func (a *app) runExec(cmd *cobra.Command, o execFlags, ref string, argv []string) error {
	start, err := a.execStart(o, ref, argv)
	if err != nil {
		return err
	}
	c, err := a.dial()
	if err != nil {
		return err
	}
	ctx, cancel := a.execContext(cmd.Context())
	defer cancel()
	x := newExecSession(a, c.sandboxes.ExecSandbox(ctx), start)
	exit, err := x.run()
	if err != nil {
		return err
	}
	if exit.GetError() != "" {
		fmt.Fprintf(a.stderr, "cubecli: the program was ended: %s\n", line(exit.GetError()))
	}
	if exit.GetExitCode() != 0 {
		return &exitError{int(exit.GetExitCode())}
	}
	return nil
}

func (a *app) execStart(o execFlags, ref string, argv []string) (*cubev1.ExecStart, error) {
	if len(argv) > 0 && argv[0] == "--" {
		argv = argv[1:]
	}
	if o.timeout < 0 {
		return nil, badFlag("timeout", "%s is negative", o.timeout)
	}
	env, err := a.environment(o.envFile, o.env)
	if err != nil {
		return nil, err
	}
	start := &cubev1.ExecStart{SandboxId: ref, Args: argv, Env: env, Cwd: o.cwd, User: o.user, Stdin: o.interactive}
	if o.timeout > 0 {
		start.Timeout = durationpb.New(o.timeout)
	}
	if !o.tty {
		return start, nil
	}
	if o.interactive && !isTerminal(a.stdin) {
		return nil, &flagError{"tty", cube.Errorf(cube.CodeInvalid, "standard input is not a terminal").
			WithHint("Leave out -t to pipe data into the program.")}
	}
	start.Tty = a.windowSize()
	if _, ok := env["TERM"]; !ok && a.getenv("TERM") != "" {
		env["TERM"] = a.getenv("TERM")
	}
	return start, nil
}
