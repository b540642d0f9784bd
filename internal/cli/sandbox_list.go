package cli

import (
	"context"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

// listPage is how many sandboxes are asked for at a time.
const listPage = 500

type listFlags struct {
	phases   []string
	template string
	metadata []string
}

func (a *app) sandboxList() *cobra.Command {
	var o listFlags
	cmd := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List the sandboxes of the node, oldest first",
		Example: `  cubecli sandbox list
  cubecli sandbox list --phase running --template base --metadata user=ann
  cubecli sandbox delete $(cubecli sandbox list -q --phase failed)`,
		Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return during("list sandboxes", a.runList(cmd, o))
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&o.phases, "phase", nil, "only sandboxes in this `PHASE`, for example running (repeatable)")
	f.StringVar(&o.template, "template", "", "only sandboxes of this `TEMPLATE`")
	f.StringArrayVar(&o.metadata, "metadata", nil, "only sandboxes with this metadata `KEY=VALUE` (repeatable)")
	_ = cmd.RegisterFlagCompletionFunc("template", a.completeTemplates)
	_ = cmd.RegisterFlagCompletionFunc("phase", cobra.FixedCompletions(phaseNames(), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (a *app) runList(cmd *cobra.Command, o listFlags) error {
	req, err := o.request()
	if err != nil {
		return err
	}
	c, err := a.dial()
	if err != nil {
		return err
	}
	ctx, cancel := a.call(cmd)
	defer cancel()
	list, err := allSandboxes(ctx, c, req)
	if err != nil {
		return err
	}
	switch {
	case a.quiet:
		ids := make([]string, len(list))
		for i, sb := range list {
			ids[i] = sb.GetId()
		}
		return a.ids(ids...)
	case a.machine():
		return documents(a, list)
	}
	rows := make([][]string, len(list))
	for i, sb := range list {
		rows[i] = []string{
			sb.GetId(), phaseName(sb.GetPhase()), sb.GetTemplateId(), sizeName(sb.GetResources()),
			ago(sb.GetCreatedAt()), ago(sb.GetExpiresAt()), pairsName(sb.GetMetadata()),
		}
	}
	return table(a.stdout, "ID PHASE TEMPLATE SIZE CREATED EXPIRES METADATA", rows)
}

// allSandboxes asks for page after page.
func allSandboxes(ctx context.Context, c *client, req *cubev1.ListSandboxRequest) ([]*cubev1.Sandbox, error) {
	var all []*cubev1.Sandbox
	for {
		res, err := c.sandboxes.ListSandbox(ctx, connect.NewRequest(req))
		if err != nil {
			return nil, err
		}
		all = append(all, res.Msg.GetSandboxes()...)
		if req.PageToken = res.Msg.GetNextPageToken(); req.PageToken == "" {
			return all, nil
		}
	}
}

func (o listFlags) request() (*cubev1.ListSandboxRequest, error) {
	meta, err := pairs("metadata", o.metadata)
	if err != nil {
		return nil, err
	}
	req := &cubev1.ListSandboxRequest{PageSize: listPage, TemplateId: o.template, Metadata: meta}
	for _, p := range o.phases {
		v, ok := cubev1.Phase_value["PHASE_"+strings.ToUpper(p)]
		if !ok || v == 0 {
			return nil, badFlag("phase", "%q is none of %s", p, strings.Join(phaseNames(), ", "))
		}
		req.Phases = append(req.Phases, cubev1.Phase(v))
	}
	return req, nil
}

// phaseNames lists the phases in the order of their table.
func phaseNames() []string {
	var names []string
	for n := int32(1); n < int32(len(cubev1.Phase_name)); n++ {
		names = append(names, phaseName(cubev1.Phase(n)))
	}
	return names
}
