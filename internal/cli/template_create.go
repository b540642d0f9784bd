package cli

import (
	"fmt"
	"path/filepath"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	cube "github.com/cubesandbox/cubelet"
	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

type buildFlags struct {
	id           string
	name         string
	archive      string
	plainHTTP    bool
	cpus         uint32
	memory       mib
	disk         mib
	startCommand string
	readyCommand string
	readyPort    uint16
	readyTimeout time.Duration
	env          []string
	envFile      []string
	key          string
}

func (a *app) templateCreate() *cobra.Command {
	var o buildFlags
	cmd := &cobra.Command{
		Use:   "create [IMAGE | --from-archive FILE]",
		Short: "Make a template from an OCI image",
		Long: `Make a template from an image in a registry, or from an archive on the node's disk (an
OCI layout or "docker save" tar). It shows the progress and ends with the ID.

With --start-cmd the program runs in every sandbox of the template from its first moment:
the memory image is taken when --ready-cmd succeeds or --ready-port accepts connections.`,
		Example: `  cubecli template create --name base registry.example.org/base:1
  cubecli template create --name base --from-archive ./base.tar --memory 1GiB --disk 4GiB
  cubecli template create --name web --start-cmd 'python3 -m http.server' --ready-port 8000 python:3`,
		Args: args(cobra.MaximumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			image := ""
			if len(args) > 0 {
				image = args[0]
			}
			return during("create template", a.runBuild(cmd, o, image))
		},
	}
	o.register(cmd)
	return cmd
}

func (o *buildFlags) register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.name, "name", "", "alias that moves to this template when it is ready")
	f.StringVar(&o.id, "id", "", "ID of the form tpl-[a-z0-9]{5,40} (default: chosen by the node)")
	f.StringVar(&o.archive, "from-archive", "", "`FILE` on the node: an OCI layout or \"docker save\" tar")
	f.BoolVar(&o.plainHTTP, "plain-http", false, "allow a registry without TLS")
	f.Uint32Var(&o.cpus, "cpus", 0, "number of virtual CPUs (default 1)")
	f.Var(&o.memory, "memory", "memory, for example 512MiB or 1GiB (default 512MiB)")
	f.Var(&o.disk, "disk", "writable layer, for example 1GiB (default 1GiB)")
	f.StringVar(&o.startCommand, "start-cmd", "", "shell `COMMAND` that runs before the memory image is taken")
	f.StringVar(&o.readyCommand, "ready-cmd", "", "shell `COMMAND` that succeeds when the start command is ready")
	f.Uint16Var(&o.readyPort, "ready-port", 0, "TCP `PORT` that accepts connections when the start command is ready")
	f.DurationVar(&o.readyTimeout, "ready-timeout", 0, "how long to wait for that (default 1m)")
	f.StringArrayVarP(&o.env, "env", "e", nil, "environment `NAME=VALUE`, added to the image's (repeatable)")
	f.StringArrayVar(&o.envFile, "env-file", nil, "`FILE` with a line NAME=VALUE per variable (repeatable)")
	f.StringVar(&o.key, "idempotency-key", "", "`KEY` that makes a retry of the same request return the same template")
	cmd.MarkFlagsMutuallyExclusive("ready-cmd", "ready-port")
}

func (a *app) runBuild(cmd *cobra.Command, o buildFlags, image string) error {
	c, err := a.dial()
	if err != nil {
		return err
	}
	req, err := a.buildRequest(o, image, c.local)
	if err != nil {
		return err
	}
	ctx, cancel := a.call(cmd)
	defer cancel()
	stream, err := c.templates.CreateTemplate(ctx, connect.NewRequest(req))
	if err != nil {
		return err
	}
	defer stream.Close() //nolint:errcheck // it was read to its end
	tpl, err := a.followBuild(stream)
	if err != nil {
		return err
	}
	if a.machine() {
		return a.document(tpl)
	}
	return a.ids(tpl.GetId())
}

// followBuild shows the progress and returns the template.
func (a *app) followBuild(stream *connect.ServerStreamForClient[cubev1.CreateTemplateResponse]) (*cubev1.Template, error) {
	show := a.newProgress()
	defer show.close()
	var tpl *cubev1.Template
	for stream.Receive() {
		if t := stream.Msg().GetTemplate(); t != nil {
			tpl = t
		}
		if p := stream.Msg().GetProgress(); p != nil {
			label := p.GetStage()
			if p.GetMessage() != "" {
				label += ": " + p.GetMessage()
			}
			show.update(fmt.Sprintf("%6.1fs  %s", p.GetElapsed().AsDuration().Seconds(), line(label)), label, p.GetDoneBytes(), p.GetTotalBytes())
		}
	}
	if err := stream.Err(); err != nil {
		return nil, err
	}
	if tpl == nil {
		return nil, cube.Errorf(cube.CodeUnavailable, "the node ended the answer too early")
	}
	return tpl, nil
}

func (a *app) buildRequest(o buildFlags, image string, local bool) (*cubev1.CreateTemplateRequest, error) {
	if (image == "") == (o.archive == "") {
		return nil, cube.Errorf(cube.CodeInvalid, "give either an image or --from-archive").
			WithHint("For example: cubecli template create --name base registry.example.org/base:1")
	}
	env, err := a.environment(o.envFile, o.env)
	if err != nil {
		return nil, err
	}
	req := &cubev1.CreateTemplateRequest{
		Id: o.id, Name: o.name, PlainHttp: o.plainHTTP, DiskMib: uint32(o.disk),
		StartCommand: o.startCommand, Env: env, IdempotencyKey: o.key,
		Resources: &cubev1.Resources{Vcpus: o.cpus, MemoryMib: uint32(o.memory)},
	}
	if o.readyCommand != "" || o.readyPort != 0 || o.readyTimeout != 0 {
		req.Ready = &cubev1.ReadySpec{Command: o.readyCommand, Port: uint32(o.readyPort), Timeout: durationpb.New(o.readyTimeout)}
	}
	if image != "" {
		req.Source = &cubev1.CreateTemplateRequest_Image{Image: image}
		return req, nil
	}
	path := o.archive
	if local {
		if path, err = filepath.Abs(path); err != nil {
			return nil, err
		}
	}
	req.Source = &cubev1.CreateTemplateRequest_ArchivePath{ArchivePath: path}
	return req, nil
}
