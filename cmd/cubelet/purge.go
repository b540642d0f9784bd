package main

import (
	"fmt"
	"os"
	"os/exec"

	"github.com/spf13/cobra"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/daemon"
)

func newPurgeCommand() *cobra.Command {
	var f nodeFlags
	var yes, inside bool
	cmd := &cobra.Command{
		Use:   "purge",
		Short: "Remove a stopped node with all its sandboxes, templates and data",
		Long: "Remove everything that belongs to a node whose daemon is stopped: kill its sandboxes,\n" +
			"take away namespaces, links, mounts, loop devices and cgroups, delete the root.",
		Example: "  cubelet purge --yes\n  cubelet purge --root /srv/cubelet --yes",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := f.config()
			if err != nil {
				return err
			}
			if inside {
				if needNewMnt(&cfg) {
					newCubeMnt(&cfg)
				}
				return daemon.Purge(cmd.Context(), cfg)
			}
			if !yes {
				return cube.Errorf(cube.CodeInvalid, "this deletes everything below %s", cfg.Root).WithHint("give --yes to do it")
			}
			if _, err := os.Stat(cfg.Root); os.IsNotExist(err) {
				return nil
			}
			if err := purgeInside(cmd); err != nil {
				return err
			}
			if err := daemon.RemoveRoot(cfg); err != nil {
				return err
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "removed the node at %s\n", cfg.Root)
			return nil
		},
	}
	f.bind(cmd)
	cmd.Flags().BoolVar(&yes, "yes", false, "do it")
	cmd.Flags().BoolVar(&inside, insideFlag, false, "the part that runs in the node's mount namespace")
	if err := cmd.Flags().MarkHidden(insideFlag); err != nil {
		panic(err) // the flag was defined on the line above
	}
	return cmd
}

const insideFlag = "inside"

// purgeInside runs this command again for the part that belongs into the node's mount
// namespace: a process that went there could not come back to unpin it.
func purgeInside(cmd *cobra.Command) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("own path: %w", err)
	}
	child := exec.CommandContext(cmd.Context(), self, append(os.Args[1:], "--"+insideFlag)...)
	child.Stdout, child.Stderr = cmd.OutOrStdout(), cmd.ErrOrStderr()
	if err := child.Run(); err != nil {
		return fmt.Errorf("destroy what the node has in the kernel: %w", err)
	}
	return nil
}
