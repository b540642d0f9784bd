package cube

import (
	"context"
	"time"
)

// MaxVolumes is how many volumes one sandbox can have.
const MaxVolumes = 4

// VolumeSpec is a request for one volume.
type VolumeSpec struct {
	// Name is unique among volumes and matches [a-z0-9][a-z0-9-]{0,62}.
	Name    string `json:"name"`
	SizeMiB int    `json:"sizeMiB"` // 16 to 1 TiB
}

// Volume is a disk with a file system whose data outlives sandboxes.
type Volume struct {
	ID      string `json:"id"` // vol-…
	Name    string `json:"name"`
	SizeMiB int    `json:"sizeMiB"`
	// SourceID is the volume that it is a copy of.
	SourceID string `json:"sourceId,omitempty"`
	// ReadOnly marks a snapshot of a volume: it can be attached read-only and cloned.
	ReadOnly  bool         `json:"readOnly,omitempty"`
	CreatedAt time.Time    `json:"createdAt"`
	Users     []VolumeUser `json:"users,omitempty"`
	Usage     Usage        `json:"usage,omitzero"` // filled by Get
}

// VolumeUser is a sandbox that has the volume attached.
type VolumeUser struct {
	SandboxID string `json:"sandboxId"`
	ReadOnly  bool   `json:"readOnly,omitempty"`
}

// VolumeMount attaches a volume to a sandbox.
type VolumeMount struct {
	// VolumeRef is a volume's ID, name or unique ID prefix. In an answer it is the ID; it
	// is empty for a copy that a clone has for itself.
	VolumeRef string `json:"volumeRef"`
	Path      string `json:"path"` // in the guest, absolute
	ReadOnly  bool   `json:"readOnly,omitempty"`
}

// Volumes is the inbound interface of the volumes. A ref is an ID, a name or a unique
// prefix of an ID. Codes: NotFound, Invalid, AlreadyExists (name), FailedPrecondition
// (in use: names the users), NoSpace.
type Volumes interface {
	Create(ctx context.Context, spec VolumeSpec) (Volume, error)
	Get(ctx context.Context, ref string) (Volume, error)
	// List returns all volumes, oldest first.
	List(ctx context.Context) ([]Volume, error)
	// Resize makes a volume larger that no sandbox has attached.
	Resize(ctx context.Context, ref string, sizeMiB int) (Volume, error)
	// Clone copies a volume without copying blocks; the copy has a UUID of its own. The
	// source must have no writer.
	Clone(ctx context.Context, ref, name string) (Volume, error)
	// Snapshot is Clone, but the copy can only be read and cloned.
	Snapshot(ctx context.Context, ref, name string) (Volume, error)
	// Delete removes a volume that no sandbox has attached.
	Delete(ctx context.Context, ref string) error
}
