package server

import (
	"path"
	"regexp"

	"google.golang.org/protobuf/types/known/durationpb"

	cube "github.com/cubesandbox/cubelet"
	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

// toTemplateSpec converts and checks a build request.
func toTemplateSpec(req *cubev1.CreateTemplateRequest) (cube.TemplateSpec, error) {
	var c check
	if id := req.GetId(); id != "" && !regexp.MustCompile(`^tpl-[a-z0-9]{5,40}$`).MatchString(id) {
		c.fail("id", "%q does not have the form tpl-[a-z0-9]{5,40}", id)
	}
	c.text("name", req.GetName(), maxRefBytes)
	c.text("image", req.GetImage(), maxImageBytes)
	c.text("start_command", req.GetStartCommand(), maxCommandBytes)
	c.env("env", req.GetEnv())
	c.key(req.GetIdempotencyKey())
	c.source(req)
	spec := cube.TemplateSpec{
		ID:             req.GetId(),
		Name:           req.GetName(),
		Image:          req.GetImage(),
		PlainHTTP:      req.GetPlainHttp(),
		ArchivePath:    req.GetArchivePath(),
		Resources:      toResources(req.GetResources()),
		DiskMiB:        int(req.GetDiskMib()),
		StartCommand:   req.GetStartCommand(),
		Ready:          c.ready(req.GetReady()),
		Env:            req.GetEnv(),
		IdempotencyKey: req.GetIdempotencyKey(),
	}
	return spec, c.err
}

func (c *check) source(req *cubev1.CreateTemplateRequest) {
	archive := req.GetArchivePath()
	switch {
	case req.GetImage() == "" && archive == "":
		c.add(cube.InvalidField("image", "is required").
			WithHint("Name an image in a registry, or give archive_path."))
	case archive == "":
	case !path.IsAbs(archive):
		c.fail("archive_path", "%q is not an absolute path on the node", archive)
	case req.GetPlainHttp():
		c.fail("plain_http", "an archive is not pulled")
	default:
		c.text("archive_path", archive, maxPathBytes)
	}
}

func (c *check) ready(r *cubev1.ReadySpec) cube.ReadySpec {
	c.text("ready.command", r.GetCommand(), maxCommandBytes)
	switch {
	case r.GetPort() > 65535:
		c.fail("ready.port", "%d is no TCP port", r.GetPort())
	case r.GetPort() != 0 && r.GetCommand() != "":
		c.fail("ready", "at most one of command and port can be set")
	}
	return cube.ReadySpec{
		Command: r.GetCommand(),
		Port:    int(r.GetPort()),
		Timeout: c.duration("ready.timeout", r.GetTimeout()),
	}
}

func fromTemplate(t cube.Template) *cubev1.Template {
	sizes := make([]*cubev1.Resources, len(t.Sizes))
	for i, s := range t.Sizes {
		sizes[i] = fromResources(s)
	}
	return &cubev1.Template{
		Id:     t.ID,
		Names:  t.Names,
		State:  fromTemplateState(t.State),
		Image:  t.Image,
		Digest: t.Digest,
		Config: &cubev1.ImageConfig{
			Env:        validAll(t.Config.Env),
			WorkingDir: valid(t.Config.WorkingDir),
			User:       valid(t.Config.User),
			Entrypoint: validAll(t.Config.Entrypoint),
			Cmd:        validAll(t.Config.Cmd),
		},
		Resources:    fromResources(t.Resources),
		DiskMib:      count(t.DiskMiB),
		StartCommand: t.StartCommand,
		Ready:        fromReady(t.Ready),
		CreatedAt:    fromTime(t.CreatedAt),
		RootBytes:    t.RootBytes,
		Sizes:        sizes,
		Machine:      fromMachine(t.Machine),
	}
}

func validAll(in []string) []string {
	out := make([]string, len(in))
	for i, s := range in {
		out[i] = valid(s)
	}
	return out
}

func fromReady(r cube.ReadySpec) *cubev1.ReadySpec {
	if r == (cube.ReadySpec{}) {
		return nil
	}
	return &cubev1.ReadySpec{Command: r.Command, Port: count(r.Port), Timeout: durationpb.New(r.Timeout)}
}

func fromTemplateState(s cube.TemplateState) cubev1.TemplateState {
	switch s {
	case cube.TemplateBuilding:
		return cubev1.TemplateState_TEMPLATE_STATE_BUILDING
	case cube.TemplateReady:
		return cubev1.TemplateState_TEMPLATE_STATE_READY
	}
	return cubev1.TemplateState_TEMPLATE_STATE_UNSPECIFIED
}

func fromMachine(m cube.MachineInfo) *cubev1.MachineInfo {
	return &cubev1.MachineInfo{
		Qemu:        m.QEMU,
		MachineType: m.MachineType,
		CpuModel:    m.CPUModel,
		Accelerator: m.Accelerator,
		Kernel:      m.Kernel,
		Agent:       m.Agent,
	}
}

func fromProgress(p cube.TemplateProgress) *cubev1.CreateTemplateResponse {
	return &cubev1.CreateTemplateResponse{Event: &cubev1.CreateTemplateResponse_Progress{Progress: &cubev1.TemplateProgress{
		Stage:      p.Stage,
		Message:    valid(p.Message),
		DoneBytes:  p.Done,
		TotalBytes: p.Total,
		Elapsed:    durationpb.New(p.Elapsed),
	}}}
}
