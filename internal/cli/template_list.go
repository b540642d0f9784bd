package cli

import (
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

func (a *app) templateList() *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List the templates of the node",
		Example: "  cubecli template list\n  cubecli template list -o json | jq -r '.[].id'",
		Args:    args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.dial()
			if err != nil {
				return err
			}
			ctx, cancel := a.call(cmd)
			defer cancel()
			res, err := c.templates.ListTemplate(ctx, connect.NewRequest(&cubev1.ListTemplateRequest{}))
			if err != nil {
				return during("list templates", err)
			}
			return a.showTemplates(res.Msg.GetTemplates())
		},
	}
}

func (a *app) showTemplates(list []*cubev1.Template) error {
	if a.quiet {
		for _, tpl := range list {
			if err := a.ids(tpl.GetId()); err != nil {
				return err
			}
		}
		return nil
	}
	if a.machine() {
		return documents(a, list)
	}
	rows := make([][]string, len(list))
	for i, tpl := range list {
		rows[i] = []string{
			tpl.GetId(), strings.Join(tpl.GetNames(), ", "), stateName(tpl.GetState()), sizeName(tpl.GetResources()),
			bytesName(tpl.GetRootBytes()), ago(tpl.GetCreatedAt()), tpl.GetImage(),
		}
	}
	return table(a.stdout, "ID NAMES STATE SIZE ROOT CREATED IMAGE", rows)
}

func stateName(s cubev1.TemplateState) string {
	return strings.ToLower(strings.TrimPrefix(s.String(), "TEMPLATE_STATE_"))
}
