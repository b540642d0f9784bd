package main

import (
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/cubesandbox/cubelet/internal/daemon"
)

func newCheckCommand() *cobra.Command {
	var f nodeFlags
	var output string
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Compare journal, disk and kernel, and list what does not fit",
		Long: "Compare what the running node knows with what the host has, and list what does not\n" +
			"fit, one finding a line. Nothing is changed. No output means that everything fits;\n" +
			"the exit code is 1 when something does not.",
		Example: "  cubelet check\n  cubelet check --root /srv/cubelet -o json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := f.config()
			if err != nil {
				return err
			}
			findings, err := daemon.Check(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			if output == "json" {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(findings)
			}
			for _, x := range findings {
				fmt.Fprintf(cmd.OutOrStdout(), "%s  %s  %s\n", x.Part, x.Object, x.Detail)
			}
			if len(findings) > 0 {
				return fmt.Errorf("%d findings", len(findings))
			}
			return nil
		},
	}
	f.bind(cmd)
	cmd.Flags().StringVarP(&output, "output", "o", "table", "table or json")
	return cmd
}
