package cli

import (
	"fmt"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

func (a *app) sandboxInspect() *cobra.Command {
	return &cobra.Command{
		Use:     "inspect SANDBOX...",
		Aliases: []string{"get"},
		Short:   "Show all that is known of sandboxes",
		Example: `  cubecli sandbox inspect s3k2
  cubecli sandbox inspect -o json s3k2 | jq -r .guestAddress`,
		Args:              args(cobra.MinimumNArgs(1)),
		ValidArgsFunction: a.completeSandboxes(0),
		RunE: func(cmd *cobra.Command, refs []string) error {
			c, err := a.dial()
			if err != nil {
				return err
			}
			ctx, cancel := a.call(cmd)
			defer cancel()
			return a.each("inspect sandbox", refs, func(i int, ref string) error {
				res, err := c.sandboxes.GetSandbox(ctx, connect.NewRequest(&cubev1.GetSandboxRequest{SandboxId: ref}))
				if err != nil {
					return err
				}
				return a.showSandbox(i, res.Msg.GetSandbox())
			})
		},
	}
}

// each runs f for one reference after the other and goes on after a failure. It reports
// each failure but the last one's text, which becomes the command's error.
func (a *app) each(op string, refs []string, f func(i int, ref string) error) error {
	code := 0
	var last error
	for i, ref := range refs {
		err := f(i, ref)
		if err == nil {
			continue
		}
		if last != nil {
			fmt.Fprint(a.stderr, describe(last))
		}
		last = &opError{op: op, object: ref, err: err}
		if code == 0 {
			code = exitCode(last)
		}
	}
	if last == nil {
		return nil
	}
	return &coded{last, code}
}

func (a *app) showSandbox(i int, sb *cubev1.Sandbox) error {
	switch {
	case a.quiet:
		return a.ids(sb.GetId())
	case a.machine():
		return a.document(sb)
	}
	if i > 0 {
		fmt.Fprintln(a.stdout)
	}
	pid := ""
	if sb.GetPid() != 0 {
		pid = fmt.Sprint(sb.GetPid())
	}
	return fields(a.stdout,
		[2]string{"ID", sb.GetId()},
		[2]string{"Phase", phaseName(sb.GetPhase())},
		[2]string{"Reason", sb.GetReason()},
		[2]string{"Template", sb.GetTemplateId()},
		[2]string{"Size", sizeName(sb.GetResources())},
		[2]string{"Created", timeName(sb.GetCreatedAt())},
		[2]string{"Expires", timeName(sb.GetExpiresAt())},
		[2]string{"Guest address", sb.GetGuestAddress()},
		[2]string{"Subnet", sb.GetNetwork().GetCidr()},
		[2]string{"VMM process", pid},
		[2]string{"Metadata", pairsName(sb.GetMetadata())},
	)
}
