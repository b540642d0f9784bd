package main

import (
	"encoding/json"
	"errors"

	"github.com/spf13/cobra"

	"github.com/cubesandbox/cubelet/internal/daemon"
	"github.com/cubesandbox/cubelet/internal/doctor"
)

func newDoctorCommand() *cobra.Command {
	var f nodeFlags
	var output string
	var tryNetwork bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check and explain everything that a node needs",
		Long: "Check everything that a node needs of its host, by trying it: tools, kernel features,\n" +
			"a network namespace, the pool, and a guest that is booted with the accelerator that\n" +
			"the node would use. Nothing is left behind. The exit code is 1 when a check fails.",
		Example: "  cubelet doctor\n  cubelet doctor --accel tcg -o json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if tryNetwork {
				return daemon.TryNetworkInside(cmd.Context())
			}
			cfg, err := f.config()
			if err != nil {
				return err
			}
			var results []doctor.Result
			good := doctor.Run(cmd.Context(), daemon.DoctorChecks(cfg), func(c doctor.Check, r doctor.Result) {
				results = append(results, r)
				if output != "json" {
					doctor.Print(cmd.OutOrStdout(), c, r)
				}
			})
			if output == "json" {
				if err := json.NewEncoder(cmd.OutOrStdout()).Encode(results); err != nil {
					return err
				}
			}
			if !good {
				return errors.New("this host cannot run a node")
			}
			return nil
		},
	}
	f.bind(cmd)
	cmd.Flags().StringVarP(&output, "output", "o", "table", "table or json")
	cmd.Flags().BoolVar(&tryNetwork, daemon.DoctorNetworkFlag, false, "the part that runs in namespaces of its own")
	if err := cmd.Flags().MarkHidden(daemon.DoctorNetworkFlag); err != nil {
		panic(err) // the flag was defined on the line above
	}
	return cmd
}
