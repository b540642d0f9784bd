package cli

import (
	"fmt"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

func (a *app) templateInspect() *cobra.Command {
	return &cobra.Command{
		Use:               "inspect TEMPLATE...",
		Aliases:           []string{"get"},
		Short:             "Show all that is known of templates",
		Example:           "  cubecli template inspect base\n  cubecli template inspect -o yaml tpl-12345",
		Args:              args(cobra.MinimumNArgs(1)),
		ValidArgsFunction: a.completeTemplates,
		RunE: func(cmd *cobra.Command, refs []string) error {
			c, err := a.dial()
			if err != nil {
				return err
			}
			ctx, cancel := a.call(cmd)
			defer cancel()
			return a.each("inspect template", refs, func(i int, ref string) error {
				res, err := c.templates.GetTemplate(ctx, connect.NewRequest(&cubev1.GetTemplateRequest{TemplateId: ref}))
				if err != nil {
					return err
				}
				return a.showTemplate(i, res.Msg.GetTemplate())
			})
		},
	}
}

func (a *app) showTemplate(i int, t *cubev1.Template) error {
	switch {
	case a.quiet:
		return a.ids(t.GetId())
	case a.machine():
		return a.document(t)
	}
	if i > 0 {
		fmt.Fprintln(a.stdout)
	}
	sizes := make([]string, len(t.GetSizes()))
	for i, s := range t.GetSizes() {
		sizes[i] = sizeName(s)
	}
	m, c := t.GetMachine(), t.GetConfig()
	return fields(a.stdout,
		[2]string{"ID", t.GetId()},
		[2]string{"Names", strings.Join(t.GetNames(), ", ")},
		[2]string{"State", stateName(t.GetState())},
		[2]string{"Image", t.GetImage()},
		[2]string{"Digest", t.GetDigest()},
		[2]string{"Created", timeName(t.GetCreatedAt())},
		[2]string{"Size", sizeName(t.GetResources())},
		[2]string{"Memory images", strings.Join(sizes, "; ")},
		[2]string{"Root", bytesName(t.GetRootBytes())},
		[2]string{"Writable layer", bytesName(int64(t.GetDiskMib()) << 20)},
		[2]string{"User", c.GetUser()},
		[2]string{"Working directory", c.GetWorkingDir()},
		[2]string{"Entrypoint", strings.Join(c.GetEntrypoint(), " ")},
		[2]string{"Command", strings.Join(c.GetCmd(), " ")},
		[2]string{"Environment", strings.Join(c.GetEnv(), ", ")},
		[2]string{"Start command", t.GetStartCommand()},
		[2]string{"Ready", readyName(t.GetReady())},
		[2]string{"Machine", fmt.Sprintf("QEMU %s %s, CPU %s, %s, kernel %s, agent %s", m.GetQemu(), m.GetMachineType(), m.GetCpuModel(), m.GetAccelerator(), m.GetKernel(), m.GetAgent())},
	)
}

func readyName(r *cubev1.ReadySpec) string {
	switch {
	case r.GetCommand() != "":
		return r.GetCommand()
	case r.GetPort() != 0:
		return fmt.Sprintf("port %d", r.GetPort())
	}
	return ""
}
