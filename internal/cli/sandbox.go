package cli

import (
	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

func (a *app) sandbox() *cobra.Command {
	return group("sandbox", "Create and use sandboxes", `  cubecli sandbox create --template-id base
  cubecli sandbox list
  cubecli sandbox exec -it s3k2 -- bash`,
		a.sandboxCreate(), a.sandboxList(), a.sandboxInspect(), a.sandboxDelete(),
		a.sandboxExec(), a.sandboxCp(), a.sandboxLogs())
}

// completeSandboxes offers the IDs of the node's sandboxes, at most n arguments (0: any
// number).
func (a *app) completeSandboxes(n int) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if n > 0 && len(args) >= n {
			return nil, cobra.ShellCompDirectiveDefault
		}
		ids, err := a.sandboxIDs(cmd)
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		return ids, cobra.ShellCompDirectiveNoFileComp
	}
}

func (a *app) sandboxIDs(cmd *cobra.Command) ([]cobra.Completion, error) {
	c, err := a.dial()
	if err != nil {
		return nil, err
	}
	ctx, cancel := completionContext(cmd)
	defer cancel()
	res, err := c.sandboxes.ListSandbox(ctx, connect.NewRequest(&cubev1.ListSandboxRequest{PageSize: listPage}))
	if err != nil {
		return nil, err
	}
	var ids []cobra.Completion
	for _, sb := range res.Msg.GetSandboxes() {
		ids = append(ids, cobra.CompletionWithDesc(sb.GetId(), phaseName(sb.GetPhase())+", "+sb.GetTemplateId()))
	}
	return ids, nil
}
