package sandbox

import (
	"fmt"
	"strings"

	cube "github.com/cubesandbox/cubelet"
)

// Bounds of a request. They keep records and guest messages small.
const (
	maxEnv      = 1000
	maxMetadata = 100
	maxKeyBytes = 128
	maxValue    = 32 << 10
)

// validate checks a request that no template needs to be known for.
func validate(spec cube.SandboxSpec) error {
	switch {
	case spec.TemplateRef == "" && spec.SnapshotRef == "":
		return cube.InvalidField("template_id", "is required")
	case spec.TemplateRef != "" && spec.SnapshotRef != "":
		return cube.InvalidField("snapshot_id", "cannot be given together with template_id")
	case spec.SnapshotRef != "" && spec.Resources != (cube.Resources{}):
		return cube.InvalidField("resources", "are those of the snapshot and cannot be changed")
	case spec.OnTimeout != "" && spec.OnTimeout != cube.OnTimeoutDelete && spec.OnTimeout != cube.OnTimeoutPause:
		return cube.InvalidField("on_timeout", "%q is neither delete nor pause", spec.OnTimeout)
	case len(spec.Volumes) > 0:
		e := cube.Errorf(cube.CodeUnimplemented, "volumes are not built yet")
		e.Field = "volumes"
		return e
	case spec.Timeout < 0:
		return cube.InvalidField("timeout", "must not be negative")
	case spec.Resources.VCPUs < 0:
		return cube.InvalidField("resources.vcpus", "must not be negative")
	case spec.Resources.MemoryMiB < 0:
		return cube.InvalidField("resources.memory_mib", "must not be negative")
	case len(spec.IdempotencyKey) > maxKeyBytes:
		return cube.InvalidField("idempotency_key", "is longer than %d bytes", maxKeyBytes)
	case len(spec.Env) > maxEnv:
		return cube.InvalidField("env", "more than %d variables", maxEnv)
	case len(spec.Metadata) > maxMetadata:
		return cube.InvalidField("metadata", "more than %d entries", maxMetadata)
	}
	if err := spec.Network.Validate(); err != nil {
		return err
	}
	if err := validateStrings(spec); err != nil {
		return err
	}
	return validateMounts(spec.HostMounts)
}

func validateStrings(spec cube.SandboxSpec) error {
	for k, v := range spec.Env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return cube.InvalidField("env", "%q is not a name and value that a program can be given", k)
		}
		if len(k)+len(v) > maxValue {
			return cube.InvalidField("env."+k, "is longer than %d bytes", maxValue)
		}
	}
	for k, v := range spec.Metadata {
		if k == "" {
			return cube.InvalidField("metadata", "a key is empty")
		}
		if len(k)+len(v) > maxValue {
			return cube.InvalidField("metadata."+k, "is longer than %d bytes", maxValue)
		}
	}
	return nil
}

func validateMounts(mounts []cube.HostMount) error {
	for i, hm := range mounts {
		if err := hm.Validate(fmt.Sprintf("metadata.%s[%d]", cube.HostMountKey, i)); err != nil {
			return err
		}
	}
	if len(mounts) == 0 {
		return nil
	}
	e := cube.Errorf(cube.CodeUnimplemented, "host mounts are not built yet")
	e.Field = "metadata." + cube.HostMountKey
	return e.WithHint("leave %q out of the metadata, or copy the files with `cubecli sandbox cp`", cube.HostMountKey)
}
