package cli

import (
	"context"
	"sync"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

// deletesAtOnce bounds how many deletes one command has under way.
const deletesAtOnce = 8

func (a *app) sandboxDelete() *cobra.Command {
	ignoreMissing := false
	cmd := &cobra.Command{
		Use:     "delete SANDBOX...",
		Aliases: []string{"rm"},
		Short:   "Delete sandboxes",
		Long: `Delete sandboxes. The command returns when nothing of them is left on the node. It
prints what was deleted, goes on after a failure, and then ends with a code that is not 0.`,
		Example: `  cubecli sandbox delete s3k2 s9qa
  cubecli sandbox delete --ignore-missing s3k2`,
		Args:              args(cobra.MinimumNArgs(1)),
		ValidArgsFunction: a.completeSandboxes(0),
		RunE: func(cmd *cobra.Command, refs []string) error {
			c, err := a.dial()
			if err != nil {
				return err
			}
			ctx, cancel := a.call(cmd)
			defer cancel()
			results := inParallel(refs, func(ref string) error { return deleteSandbox(ctx, c, ref, ignoreMissing) })
			return a.each("delete sandbox", refs, func(i int, ref string) error {
				if results[i] != nil {
					return results[i]
				}
				return a.ids(ref)
			})
		},
	}
	cmd.Flags().BoolVar(&ignoreMissing, "ignore-missing", false, "succeed for a sandbox that does not exist")
	return cmd
}

func deleteSandbox(ctx context.Context, c *client, ref string, ignoreMissing bool) error {
	_, err := c.sandboxes.DeleteSandbox(ctx, connect.NewRequest(&cubev1.DeleteSandboxRequest{SandboxId: ref, AllowMissing: ignoreMissing}))
	return err
}

// inParallel calls f for every reference, a few at a time, and returns the results in
// order.
func inParallel(refs []string, f func(ref string) error) []error {
	results := make([]error, len(refs))
	slots := make(chan struct{}, deletesAtOnce)
	var calls sync.WaitGroup
	for i, ref := range refs {
		slots <- struct{}{}
		calls.Go(func() {
			defer func() { <-slots }()
			results[i] = f(ref)
		})
	}
	calls.Wait()
	return results
}
