package cli

import (
	"context"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	cube "github.com/cubesandbox/cubelet"
	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

type createFlags struct {
	template string
	metadata string
	network  string
	env      []string
	envFile  []string
	timeout  time.Duration
	cpus     uint32
	memory   mib
	key      string
}

func (a *app) sandboxCreate() *cobra.Command {
	var o createFlags
	cmd := &cobra.Command{
		Use:   "create --template-id TEMPLATE",
		Short: "Create a sandbox",
		Long: `Create a sandbox and wait until its guest agent has answered. It prints the ID, and on a
terminal how long each stage took.

--timeout is the sandbox's time to live: it is deleted when that has passed. How long
cubecli waits for the node is --deadline.`,
		Example: `  cubecli sandbox create --template-id base
  cubecli sandbox create --template-id tpl-12345 --cpus 2 --memory 1GiB --timeout 10m --env LANG=C.UTF-8
  cubecli sandbox create --template-id tpl-12345 --network '{"cidr":"192.168.10.0/24"}' \
    --metadata '{"host-mount":[{"hostPath":"/data/models","containerPath":"/mnt/models"}]}'`,
		Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return during("create sandbox", a.runCreate(cmd, o))
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.template, "template-id", "", "`TEMPLATE` to start from: ID, name, or unique beginning of an ID (required)")
	f.StringVar(&o.metadata, "metadata", "", "`JSON` object of strings to find the sandbox by; its key host-mount holds an array of host mounts")
	f.StringVar(&o.network, "network", "", "`JSON` object with the network's settings, for example {\"cidr\":\"192.168.10.0/24\"}")
	f.StringArrayVarP(&o.env, "env", "e", nil, "environment `NAME=VALUE` of every program; NAME alone takes cubecli's own value (repeatable)")
	f.StringArrayVar(&o.envFile, "env-file", nil, "`FILE` with a line NAME=VALUE per variable (repeatable)")
	f.DurationVar(&o.timeout, "timeout", 0, "time to live, for example 10m; the sandbox is deleted then (0: never)")
	f.Uint32Var(&o.cpus, "cpus", 0, "number of virtual CPUs (0: the template's)")
	f.Var(&o.memory, "memory", "memory, for example 512, 512MiB or 1GiB (0: the template's)")
	f.StringVar(&o.key, "idempotency-key", "", "`KEY` that makes a retry of the same request return the same sandbox")
	_ = cmd.RegisterFlagCompletionFunc("template-id", a.completeTemplates)
	return cmd
}

func (a *app) runCreate(cmd *cobra.Command, o createFlags) error {
	req, err := a.createRequest(o)
	if err != nil {
		return err
	}
	c, err := a.dial()
	if err != nil {
		return err
	}
	ctx, cancel := a.call(cmd)
	defer cancel()
	res, err := a.create(ctx, c, req)
	if err != nil {
		return err
	}
	if a.machine() {
		return a.document(res)
	}
	if err := a.ids(res.GetSandbox().GetId()); err != nil || a.quiet || !isTerminal(a.stdout) {
		return err
	}
	return table(a.stdout, "STAGE START TIME", timingRows(res.GetTimings()))
}

func (a *app) create(ctx context.Context, c *client, req *cubev1.CreateSandboxRequest) (*cubev1.CreateSandboxResponse, error) {
	res, err := c.sandboxes.CreateSandbox(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return res.Msg, nil
}

func timingRows(timings []*cubev1.StageTiming) [][]string {
	rows := make([][]string, len(timings))
	for i, t := range timings {
		rows[i] = []string{t.GetStage(), millis(t.GetStart()), millis(t.GetDuration())}
	}
	return rows
}

func (a *app) createRequest(o createFlags) (*cubev1.CreateSandboxRequest, error) {
	if o.template == "" {
		return nil, &flagError{"template-id", cube.Errorf(cube.CodeInvalid, "is required").
			WithHint("List the templates with `cubecli template list`.")}
	}
	if o.timeout < 0 {
		return nil, badFlag("timeout", "%s is negative", o.timeout)
	}
	env, err := a.environment(o.envFile, o.env)
	if err != nil {
		return nil, err
	}
	req := &cubev1.CreateSandboxRequest{TemplateId: o.template, Env: env, IdempotencyKey: o.key}
	if o.timeout > 0 {
		req.Timeout = durationpb.New(o.timeout)
	}
	if o.cpus > 0 || o.memory > 0 {
		req.Resources = &cubev1.Resources{Vcpus: o.cpus, MemoryMib: uint32(o.memory)}
	}
	if err := o.addJSON(req); err != nil {
		return nil, err
	}
	return req, nil
}

// addJSON adds the settings that are given as JSON.
func (o createFlags) addJSON(req *cubev1.CreateSandboxRequest) error {
	if o.network != "" {
		n, err := jsonFlag("network", o.network, cube.ParseNetwork)
		if err != nil {
			return err
		}
		req.Network = &cubev1.NetworkSpec{Cidr: n.CIDR}
	}
	if o.metadata == "" {
		return nil
	}
	_, err := jsonFlag("metadata", o.metadata, func(b []byte) (struct{}, error) {
		meta, mounts, err := cube.ParseMetadata(b)
		req.Metadata = meta
		for _, m := range mounts {
			req.HostMounts = append(req.HostMounts, &cubev1.HostMount{
				HostPath: m.HostPath, ContainerPath: m.ContainerPath, ReadOnly: m.ReadOnly,
			})
		}
		return struct{}{}, err
	})
	return err
}
