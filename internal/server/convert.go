package server

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	cube "github.com/cubesandbox/cubelet"
	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

// The phases of package cube and of the API have the same numbers; a test holds that.

func fromPhase(p cube.Phase) cubev1.Phase { return cubev1.Phase(p) }

func fromSandbox(s cube.Sandbox) *cubev1.Sandbox {
	return &cubev1.Sandbox{
		Id:           s.ID,
		Phase:        fromPhase(s.Phase),
		Reason:       valid(s.Reason),
		TemplateId:   s.TemplateID,
		Resources:    fromResources(s.Resources),
		Metadata:     s.Metadata,
		Network:      &cubev1.NetworkSpec{Cidr: s.Network.CIDR},
		CreatedAt:    fromTime(s.CreatedAt),
		ExpiresAt:    fromTime(s.ExpiresAt),
		GuestAddress: s.GuestAddress,
		Pid:          int64(s.PID),
	}
}

func fromTimings(in []cube.StageTiming) []*cubev1.StageTiming {
	out := make([]*cubev1.StageTiming, len(in))
	for i, t := range in {
		out[i] = &cubev1.StageTiming{
			Stage:    t.Stage,
			Start:    durationpb.New(t.Start),
			Duration: durationpb.New(t.Duration),
		}
	}
	return out
}

func fromResources(r cube.Resources) *cubev1.Resources {
	return &cubev1.Resources{Vcpus: count(r.VCPUs), MemoryMib: count(r.MemoryMiB)}
}

// toResources only widens; what sizes are possible is for the callee to say.
func toResources(r *cubev1.Resources) cube.Resources {
	return cube.Resources{VCPUs: int(r.GetVcpus()), MemoryMiB: int(r.GetMemoryMib())}
}

// fromTime returns nil for the zero time.
func fromTime(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

// count converts a number that cannot be negative.
func count(n int) uint32 { return uint32(max(n, 0)) }

// toSandboxSpec converts and checks a create request.
func toSandboxSpec(req *cubev1.CreateSandboxRequest) (cube.SandboxSpec, error) {
	var c check
	c.ref("template_id", req.GetTemplateId())
	c.env("env", req.GetEnv())
	c.metadata(req.GetMetadata())
	c.key(req.GetIdempotencyKey())
	spec := cube.SandboxSpec{
		TemplateRef:    req.GetTemplateId(),
		Resources:      toResources(req.GetResources()),
		Env:            req.GetEnv(),
		Timeout:        c.duration("timeout", req.GetTimeout()),
		Network:        cube.NetworkSpec{CIDR: req.GetNetwork().GetCidr()},
		IdempotencyKey: req.GetIdempotencyKey(),
	}
	c.add(spec.Network.Validate())
	c.add(refuseUnbuilt(req))
	if c.err != nil {
		return cube.SandboxSpec{}, c.err
	}
	var err error
	spec.Metadata, spec.HostMounts, err = toMetadata(req)
	return spec, err
}

// refuseUnbuilt names what the protocol has and the engine does not do yet, so that
// nobody takes silence for consent.
func refuseUnbuilt(req *cubev1.CreateSandboxRequest) error {
	field := ""
	switch {
	case req.GetSnapshotId() != "":
		field = "snapshot_id"
	case req.GetOnTimeout() != cubev1.OnTimeout_ON_TIMEOUT_UNSPECIFIED && req.GetOnTimeout() != cubev1.OnTimeout_ON_TIMEOUT_DELETE:
		field = "on_timeout"
	case len(req.GetVolumes()) > 0:
		field = "volumes"
	default:
		return nil
	}
	e := cube.Errorf(cube.CodeUnimplemented, "%s is not built yet", field)
	e.Field = field
	return e.WithHint("leave it out")
}

// toMetadata takes host mounts out of the metadata, where clients put them that have
// no other field for them.
func toMetadata(req *cubev1.CreateSandboxRequest) (map[string]string, []cube.HostMount, error) {
	meta := make(map[string]string, len(req.GetMetadata()))
	for k, v := range req.GetMetadata() {
		meta[k] = v
	}
	text, inMetadata := meta[cube.HostMountKey]
	delete(meta, cube.HostMountKey)
	mounts, err := toHostMounts(req.GetHostMounts())
	switch {
	case err != nil:
		return nil, nil, err
	case inMetadata && len(mounts) > 0:
		return nil, nil, cube.InvalidField("host_mounts", "host mounts are also given in metadata.%s", cube.HostMountKey).
			WithHint("Give them in one of the two places.")
	case inMetadata:
		if mounts, err = cube.ParseHostMounts([]byte(text)); err != nil {
			return nil, nil, err
		}
	}
	if len(mounts) > maxHostMounts {
		return nil, nil, cube.InvalidField("host_mounts", "%d mounts; at most %d are allowed", len(mounts), maxHostMounts)
	}
	return meta, mounts, nil
}

func toHostMounts(in []*cubev1.HostMount) ([]cube.HostMount, error) {
	var out []cube.HostMount
	for i, m := range in {
		hm := cube.HostMount{HostPath: m.GetHostPath(), ContainerPath: m.GetContainerPath(), ReadOnly: m.GetReadOnly()}
		if err := hm.Validate(index("host_mounts", i)); err != nil {
			return nil, err
		}
		out = append(out, hm)
	}
	return out, nil
}

// toListFilter converts and checks a list request.
func toListFilter(req *cubev1.ListSandboxRequest) (cube.ListFilter, error) {
	var c check
	if req.GetPageSize() > maxPageSize {
		c.fail("page_size", "%d; at most %d is allowed", req.GetPageSize(), maxPageSize)
	}
	c.text("page_token", req.GetPageToken(), maxTokenBytes)
	c.text("template_id", req.GetTemplateId(), maxRefBytes)
	c.metadata(req.GetMetadata())
	f := cube.ListFilter{
		TemplateRef: req.GetTemplateId(),
		Metadata:    req.GetMetadata(),
		PageSize:    int(min(req.GetPageSize(), maxPageSize)),
		PageToken:   req.GetPageToken(),
	}
	for i, p := range req.GetPhases() {
		phase := cube.Phase(p)
		if !phase.Valid() {
			c.fail(index("phases", i), "no phase %d", int32(p))
		}
		f.Phases = append(f.Phases, phase)
	}
	return f, c.err
}

// toExecSpec converts and checks the first message of an exec.
func toExecSpec(s *cubev1.ExecStart) (cube.ExecSpec, error) {
	var c check
	c.ref("start.sandbox_id", s.GetSandboxId())
	c.args("start.args", s.GetArgs())
	c.env("start.env", s.GetEnv())
	c.text("start.cwd", s.GetCwd(), maxPathBytes)
	c.text("start.user", s.GetUser(), maxRefBytes)
	spec := cube.ExecSpec{
		Args:    s.GetArgs(),
		Env:     s.GetEnv(),
		Cwd:     s.GetCwd(),
		User:    s.GetUser(),
		Stdin:   s.GetStdin(),
		Timeout: c.duration("start.timeout", s.GetTimeout()),
	}
	if s.GetTty() != nil {
		ws := c.windowSize("start.tty", s.GetTty())
		spec.TTY = &ws
	}
	return spec, c.err
}

func fromExecEvent(e cube.ExecEvent) *cubev1.ExecSandboxResponse {
	switch {
	case e.Exit != nil:
		return &cubev1.ExecSandboxResponse{Response: &cubev1.ExecSandboxResponse_Exited{Exited: &cubev1.ExecExited{
			ExitCode: int32(e.Exit.Code),
			Signal:   valid(e.Exit.Signal),
			Status:   valid(e.Exit.Status),
			Error:    valid(e.Exit.Error),
		}}}
	case e.Stream == cube.StreamStdout:
		return &cubev1.ExecSandboxResponse{Response: &cubev1.ExecSandboxResponse_Stdout{Stdout: e.Data}}
	case e.Stream == cube.StreamStderr:
		return &cubev1.ExecSandboxResponse{Response: &cubev1.ExecSandboxResponse_Stderr{Stderr: e.Data}}
	case e.Stream == cube.StreamTTY:
		return &cubev1.ExecSandboxResponse{Response: &cubev1.ExecSandboxResponse_Tty{Tty: e.Data}}
	}
	return &cubev1.ExecSandboxResponse{Response: &cubev1.ExecSandboxResponse_Started{Started: &cubev1.ExecStarted{Pid: e.PID}}}
}
