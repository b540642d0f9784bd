package cube

import (
	"context"
	"time"
)

// TemplateState tells how far a template is.
type TemplateState string

// The states of a template. A failed build leaves no template behind.
const (
	TemplateBuilding TemplateState = "building"
	TemplateReady    TemplateState = "ready"
)

// TemplateSpec is a request for one template. Exactly one of Image and ArchivePath is set.
type TemplateSpec struct {
	// ID is chosen by the node when empty. It has the form tpl-[a-z0-9]{5,40}.
	ID string `json:"id,omitempty"`
	// Name is an alias; it moves to this template when the build succeeds.
	Name string `json:"name,omitempty"`
	// Image is a registry reference.
	Image string `json:"image,omitempty"`
	// PlainHTTP allows a registry without TLS; localhost needs no permission.
	PlainHTTP bool `json:"plainHTTP,omitempty"`
	// ArchivePath is an absolute path on the node: an OCI layout or `docker save` tar.
	ArchivePath string    `json:"archivePath,omitempty"`
	Resources   Resources `json:"resources"` // zero: 1 vCPU, 512 MiB
	// DiskMiB is the size of the writable layer. Zero: 1024.
	DiskMiB int `json:"diskMiB,omitempty"`
	// StartCommand is run with /bin/sh -c before the memory image is taken.
	StartCommand string `json:"startCommand,omitempty"`
	// Ready tells when the start command is ready; the memory image is taken then.
	Ready ReadySpec         `json:"ready"`
	Env   map[string]string `json:"env,omitempty"` // added to the image's
	// IdempotencyKey works as in SandboxSpec.
	IdempotencyKey string `json:"idempotencyKey,omitempty"`
}

// ReadySpec tells when a template's start command is ready. At most one of Command
// and Port is set; neither means at once.
type ReadySpec struct {
	Command string        `json:"command,omitempty"` // exits 0 when ready, /bin/sh -c
	Port    int           `json:"port,omitempty"`    // accepts a TCP connection when ready
	Timeout time.Duration `json:"timeout,omitempty"` // zero: 60 s
}

// ImageConfig is the part of an OCI image's configuration that we honour.
type ImageConfig struct {
	Env        []string `json:"env,omitempty"` // KEY=value
	WorkingDir string   `json:"workingDir,omitempty"`
	User       string   `json:"user,omitempty"` // user[:group], names or numbers
	Entrypoint []string `json:"entrypoint,omitempty"`
	Cmd        []string `json:"cmd,omitempty"`
}

// Template is what is known of one template.
type Template struct {
	ID           string        `json:"id"`
	Names        []string      `json:"names,omitempty"`
	State        TemplateState `json:"state"`
	Image        string        `json:"image"`  // the reference or archive it was built from
	Digest       string        `json:"digest"` // of the image's manifest, sha256:…
	Config       ImageConfig   `json:"config"`
	Resources    Resources     `json:"resources"` // of the first memory image
	DiskMiB      int           `json:"diskMiB"`
	StartCommand string        `json:"startCommand,omitempty"`
	Ready        ReadySpec     `json:"ready"`
	CreatedAt    time.Time     `json:"createdAt"`
	RootBytes    int64         `json:"rootBytes"` // of the EROFS image
	// Sizes lists every size for which a memory image exists.
	Sizes   []Resources `json:"sizes,omitempty"`
	Machine MachineInfo `json:"machine"` // what the memory images can be restored on
}

// MachineInfo is what a memory image depends on. All fields must match at restore.
type MachineInfo struct {
	QEMU        string `json:"qemu"`        // version, for example "10.0.2"
	MachineType string `json:"machineType"` // for example "microvm"
	CPUModel    string `json:"cpuModel"`
	Accelerator string `json:"accelerator"` // tcg or kvm
	Kernel      string `json:"kernel"`      // guest kernel release
	Agent       string `json:"agent"`       // version of the guest agent
}

// TemplateProgress is one step of a template build. Total is zero when unknown.
type TemplateProgress struct {
	Stage   string        `json:"stage"` // pull, unpack, root-disk, boot, start, memory-image, done
	Message string        `json:"message,omitempty"`
	Done    int64         `json:"done,omitempty"`  // bytes
	Total   int64         `json:"total,omitempty"` // bytes
	Elapsed time.Duration `json:"elapsed"`         // since the build began
}

// Templates is the inbound interface of internal/template. A ref is an ID, a name or
// a unique prefix of an ID.
type Templates interface {
	// Create builds a template and calls progress from one goroutine at a time.
	// Codes: Invalid (hostile or broken image, other architecture), NotFound (image),
	// AlreadyExists, NoSpace, Unavailable (registry), DeadlineExceeded, Internal.
	Create(ctx context.Context, spec TemplateSpec, progress func(TemplateProgress)) (Template, error)
	Get(ctx context.Context, ref string) (Template, error)
	List(ctx context.Context) ([]Template, error)
	// Delete removes a template. CodeFailedPrecondition names those who use it, unless
	// force: then it is hidden at once, they go on, and its space is freed with the last.
	Delete(ctx context.Context, ref string, force bool) error
}
