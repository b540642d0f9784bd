package cli

import (
	"context"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

func (a *app) sandboxLogs() *cobra.Command {
	follow, tail := false, uint32(0)
	cmd := &cobra.Command{
		Use:   "logs SANDBOX",
		Short: "Print the console log of a sandbox",
		Long: `Print what the guest's kernel and agent wrote to the console. On a terminal, control
characters in it are shown and not obeyed.`,
		Example: `  cubecli sandbox logs s3k2
  cubecli sandbox logs -f --tail 20 s3k2`,
		Args:              args(cobra.ExactArgs(1)),
		ValidArgsFunction: a.completeSandboxes(1),
		RunE: func(cmd *cobra.Command, refs []string) error {
			c, err := a.dial()
			if err != nil {
				return err
			}
			ctx, cancel := a.call(cmd)
			defer cancel()
			req := &cubev1.GetSandboxLogsRequest{SandboxId: refs[0], TailLines: tail, Follow: follow}
			return during("read logs", a.copyLogs(ctx, c, req))
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "wait for more until interrupted")
	cmd.Flags().Uint32Var(&tail, "tail", 0, "only the last `N` lines (0: all that is kept)")
	return cmd
}

func (a *app) copyLogs(ctx context.Context, c *client, req *cubev1.GetSandboxLogsRequest) error {
	stream, err := c.sandboxes.GetSandboxLogs(ctx, connect.NewRequest(req))
	if err != nil {
		return err
	}
	defer stream.Close() //nolint:errcheck // it was read to its end
	out := a.text(a.stdout)
	for stream.Receive() {
		if _, err := out.Write(stream.Msg().GetData()); err != nil {
			return err
		}
	}
	return stream.Err()
}
