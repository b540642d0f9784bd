package cli

import (
	"fmt"
	"runtime/debug"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

func (a *app) version() *cobra.Command {
	clientOnly := false
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Show the versions of cubecli and of the node",
		Example: "  cubecli version\n  cubecli version --client",
		Args:    args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			own := buildVersion()
			if clientOnly {
				return a.showVersions(own, nil)
			}
			c, err := a.dial()
			if err != nil {
				return err
			}
			ctx, cancel := a.call(cmd)
			defer cancel()
			res, err := c.node.GetVersion(ctx, connect.NewRequest(&cubev1.GetVersionRequest{}))
			if err != nil {
				if !a.machine() {
					_ = a.showVersions(own, nil) // the error below matters more
				}
				return during("get the node's version", err)
			}
			return a.showVersions(own, res.Msg.GetVersion())
		},
	}
	cmd.Flags().BoolVar(&clientOnly, "client", false, "do not ask the node")
	return cmd
}

func (a *app) showVersions(own, node *cubev1.Version) error {
	if a.machine() {
		if node == nil {
			node = own
		}
		return a.document(node)
	}
	pairs := [][2]string{{"cubecli", versionName(own)}}
	if node != nil {
		pairs = append(pairs, [2]string{"cubelet", versionName(node)})
	}
	return fields(a.stdout, pairs...)
}

func versionName(v *cubev1.Version) string {
	text := v.GetCubelet()
	if v.GetCommit() != "" {
		text += " (" + v.GetCommit() + ")"
	}
	return fmt.Sprintf("%s, %s, API %s", text, v.GetGo(), v.GetApi())
}

// buildVersion reads what the Go tool stamped into the binary.
func buildVersion() *cubev1.Version {
	v := &cubev1.Version{Cubelet: "devel", Api: "cube.v1"}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return v
	}
	v.Go = info.GoVersion
	if info.Main.Version != "" && info.Main.Version != "(devel)" {
		v.Cubelet = info.Main.Version
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			v.Commit = s.Value[:min(len(s.Value), 12)]
		}
	}
	return v
}
