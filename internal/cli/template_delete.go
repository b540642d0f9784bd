package cli

import (
	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

func (a *app) templateDelete() *cobra.Command {
	ignoreMissing, force := false, false
	cmd := &cobra.Command{
		Use:     "delete TEMPLATE...",
		Aliases: []string{"rm"},
		Short:   "Delete templates",
		Long: `Delete templates. A template that a sandbox uses is kept; the error names the sandboxes.
With --force it vanishes at once all the same: its sandboxes go on, no new one can be made
of it, and its space is freed when the last of them is deleted.
The command goes on after a failure, and then ends with a code that is not 0.`,
		Example:           "  cubecli template delete tpl-12345\n  cubecli template delete --force tpl-12345",
		Args:              args(cobra.MinimumNArgs(1)),
		ValidArgsFunction: a.completeTemplates,
		RunE: func(cmd *cobra.Command, refs []string) error {
			c, err := a.dial()
			if err != nil {
				return err
			}
			ctx, cancel := a.call(cmd)
			defer cancel()
			return a.each("delete template", refs, func(_ int, ref string) error {
				req := &cubev1.DeleteTemplateRequest{TemplateId: ref, AllowMissing: ignoreMissing, Force: force}
				if _, err := c.templates.DeleteTemplate(ctx, connect.NewRequest(req)); err != nil {
					return err
				}
				return a.ids(ref)
			})
		},
	}
	cmd.Flags().BoolVar(&ignoreMissing, "ignore-missing", false, "succeed for a template that does not exist")
	cmd.Flags().BoolVar(&force, "force", false, "delete a template that sandboxes use, too")
	return cmd
}
