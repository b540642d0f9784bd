package cli

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
)

const defaultAddress = "unix:///var/lib/cubelet/run/cubelet.sock"

func (a *app) root() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cubecli",
		Short: "Manage the sandboxes and templates of a Cubelet node",
		Long: `cubecli manages the sandboxes and templates of a Cubelet node.

A template is made once from an OCI image. A sandbox is a MicroVM that starts from a
template. Objects are named by their ID or by any unique beginning of it; templates
also by their name.`,
		Example: `  # Make a template, start a sandbox, run a program in it, delete it
  cubecli template create --name base registry.example.org/base:1
  id=$(cubecli sandbox create -q --template-id base)
  cubecli sandbox exec $id -- python3 -c 'print(6*7)'
  cubecli sandbox delete $id`,
		SilenceUsage:      true,
		SilenceErrors:     true,
		PersistentPreRunE: func(*cobra.Command, []string) error { return a.checkFlags() },
		Args:              unknownCommand,
		RunE:              func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return &usageError{cmd, err} })
	a.globalFlags(cmd)
	cmd.AddCommand(a.sandbox(), a.template(), a.node(), a.version(), exitCodesTopic())
	cmd.InitDefaultCompletionCmd()
	for _, sub := range cmd.Commands() {
		if sub.Name() == "completion" {
			sub.Short = "Write a completion script for a shell"
			sub.Example = "  # bash, for this session\n  source <(cubecli completion bash)"
		}
	}
	return cmd
}

func (a *app) globalFlags(cmd *cobra.Command) {
	address := a.getenv("CUBELET_ADDRESS")
	if address == "" {
		address = defaultAddress
	}
	f := cmd.PersistentFlags()
	f.StringVar(&a.address, "address", address, "where the node listens: unix:///PATH, or HOST:PORT with --tls-* (also CUBELET_ADDRESS)")
	f.StringVar(&a.tlsCert, "tls-cert", "", "client certificate, PEM `FILE`, for HOST:PORT")
	f.StringVar(&a.tlsKey, "tls-key", "", "key of the client certificate, PEM `FILE`")
	f.StringVar(&a.tlsCA, "tls-ca", "", "CA that signed the node's certificate, PEM `FILE`")
	f.StringVarP(&a.format, "output", "o", "table", "output `FORMAT`: table, json or yaml")
	f.BoolVarP(&a.quiet, "quiet", "q", false, "print IDs only")
	f.DurationVar(&a.deadline, "deadline", 0, "give up a call after this time, for example 30s (0: never)")
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"table", "json", "yaml"}, cobra.ShellCompDirectiveNoFileComp))
}

func (a *app) checkFlags() error {
	switch a.format {
	case "table", "json", "yaml":
	default:
		return badFlag("output", "%q is none of table, json, yaml", a.format)
	}
	if a.deadline < 0 {
		return badFlag("deadline", "%s is negative", a.deadline)
	}
	return nil
}

// group returns a command that only holds others.
func group(use, short, example string, subs ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use:     use,
		Short:   short,
		Example: example,
		Args:    unknownCommand,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(subs...)
	return cmd
}

// unknownCommand refuses arguments of a group, and guesses what was meant.
func unknownCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	text := fmt.Sprintf("unknown command %q for %q", args[0], cmd.CommandPath())
	cmd.SuggestionsMinimumDistance = 2
	if like := cmd.SuggestionsFor(args[0]); len(like) > 0 {
		text += "; did you mean " + strings.Join(like, " or ") + "?"
	}
	return &usageError{cmd, fmt.Errorf("%s", text)}
}

// args wraps a check of arguments so that a mistake shows how to get help.
func args(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return &usageError{cmd, err}
		}
		return nil
	}
}
