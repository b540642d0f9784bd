package cube

import (
	"context"
	"io"
	"time"
)

// SnapshotSpec is a request for one snapshot.
type SnapshotSpec struct {
	// ID is chosen by the node when empty. It has the form snap-[a-z0-9]{5,40}.
	ID string `json:"id,omitempty"`
	// Name is an alias, unique among snapshots; empty: none.
	Name string `json:"name,omitempty"`
}

// Snapshot is what is known of one snapshot: memory, device state, writable layer and
// volumes of a sandbox at one instant. It is complete in itself.
type Snapshot struct {
	ID   string `json:"id"`
	Name string `json:"name,omitempty"`
	// ParentID is the snapshot that the sandbox was made from, rolled back to or last
	// frozen as; empty when it came from its template alone.
	ParentID   string    `json:"parentId,omitempty"`
	SandboxID  string    `json:"sandboxId,omitempty"` // which it was taken of; empty: imported from elsewhere
	TemplateID string    `json:"templateId"`
	Resources  Resources `json:"resources"`
	CreatedAt  time.Time `json:"createdAt"`
	// DirtyBytes is how much memory differed from the image below and was written.
	DirtyBytes int64 `json:"dirtyBytes"`
	// Frozen is how long the guest stood still; zero when it was paused anyway.
	Frozen  time.Duration `json:"frozen,omitempty"`
	Volumes []VolumeMount `json:"volumes,omitempty"`
	Machine MachineInfo   `json:"machine"` // what it can be restored on
	// Users are the sandboxes that run from it, sorted.
	Users   []string      `json:"users,omitempty"`
	Usage   Usage         `json:"usage,omitzero"` // filled by Get
	Timings []StageTiming `json:"timings,omitempty"`
}

// Usage is the space of one object on the pool, in bytes.
type Usage struct {
	Logical   int64 `json:"logical"`   // sum of the files' sizes
	Exclusive int64 `json:"exclusive"` // blocks that nothing else uses: freed by a delete
	Shared    int64 `json:"shared"`    // blocks that other files use too
}

// TransferProgress is one step of an export or import. Total is zero when unknown.
type TransferProgress struct {
	Done, Total int64 // bytes of uncompressed data
}

// Snapshots is the inbound interface of the catalogue. A ref is an ID, a name or a
// unique prefix of an ID.
type Snapshots interface {
	Get(ctx context.Context, ref string) (Snapshot, error)
	// List returns all snapshots, oldest first.
	List(ctx context.Context) ([]Snapshot, error)
	// Delete removes a snapshot. CodeFailedPrecondition names the sandboxes that use it,
	// unless force: then it is hidden at once and its space is freed with the last user.
	Delete(ctx context.Context, ref string, force bool) error
	// Clone copies a snapshot without copying blocks. dst is the new ID or a name.
	Clone(ctx context.Context, srcRef, dst string) (Snapshot, error)
	// Export writes the snapshot as one compressed archive.
	Export(ctx context.Context, ref string, w io.Writer, progress func(TransferProgress)) error
	// Import reads an archive and checks every digest. name may be empty. Codes: Invalid
	// (not an archive, damaged), FailedPrecondition (made for another machine: names both
	// sides), AlreadyExists, NoSpace.
	Import(ctx context.Context, r io.Reader, name string, progress func(TransferProgress)) (Snapshot, error)
}
