// Command cubelet is the node daemon. It parses flags and hands over to internal/daemon.
package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"

	cube "github.com/cubesandbox/cubelet"
)

// Set by the linker (-X main.version=… -X main.commit=…).
var (
	version = "dev"
	commit  = "unknown" //nolint:gochecknoglobals // as version, which the linter knows
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	cmd := newRootCommand()
	if err := cmd.ExecuteContext(ctx); err != nil {
		printError(err)
		stop()
		os.Exit(1) //nolint:gocritic // stop was called
	}
}

func newRootCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cubelet",
		Short: "Node daemon of a MicroVM sandbox platform",
		Long: "cubelet turns API calls into MicroVMs with their own kernel and owns their whole life.\n" +
			"Talk to it with cubecli.",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	cmd.AddCommand(newServeCommand(), newDoctorCommand(), newCheckCommand(), newPurgeCommand(), newVersionCommand())
	return cmd
}

func newVersionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := buildVersion()
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "cubelet %s (commit %s, %s, API %s)\n", v.Cubelet, v.Commit, v.Go, v.API)
			return err
		},
	}
}

func buildVersion() cube.Version {
	v := cube.Version{Cubelet: version, Go: runtime.Version(), API: "cube.v1", Commit: commit}
	if info, ok := debug.ReadBuildInfo(); ok && commit == "unknown" {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				v.Commit = s.Value
			}
		}
	}
	return v
}

// printError shows an error and what can be done about it.
func printError(err error) {
	fmt.Fprintln(os.Stderr, "Error:", err)
	if hint := hintOf(err); hint != "" {
		fmt.Fprintln(os.Stderr, "Hint:", hint)
	}
}

func newLogger(level slog.Level) *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
}
