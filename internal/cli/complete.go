package cli

import (
	"context"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

// completionTime bounds the question to the node: the user waits at the prompt.
const completionTime = 2 * time.Second

func completionContext(cmd *cobra.Command) (context.Context, context.CancelFunc) {
	ctx := cmd.Context()
	if ctx == nil {
		ctx = context.Background()
	}
	return context.WithTimeout(ctx, completionTime)
}

// completeTemplates offers the names and IDs of the node's templates.
func (a *app) completeTemplates(cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	c, err := a.dial()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	ctx, cancel := completionContext(cmd)
	defer cancel()
	res, err := c.templates.ListTemplate(ctx, connect.NewRequest(&cubev1.ListTemplateRequest{}))
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var out []cobra.Completion
	for _, tpl := range res.Msg.GetTemplates() {
		for _, name := range tpl.GetNames() {
			out = append(out, cobra.CompletionWithDesc(name, tpl.GetId()))
		}
		out = append(out, cobra.CompletionWithDesc(tpl.GetId(), strings.Join(tpl.GetNames(), ", ")))
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}
