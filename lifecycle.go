package cube

import (
	"context"
	"time"
)

// PauseMode tells what a pause keeps.
type PauseMode string

// The pause modes.
const (
	// PauseFull saves memory and device state on the pool and frees all host memory.
	PauseFull PauseMode = "full"
	// PauseKeepMemory only stops the vCPUs.
	PauseKeepMemory PauseMode = "keep-memory"
	// PauseFilesystem shuts the guest down and keeps only its disks: resume boots cold.
	PauseFilesystem PauseMode = "filesystem"
)

// Valid reports whether m is one of the modes.
func (m PauseMode) Valid() bool {
	return m == PauseFull || m == PauseKeepMemory || m == PauseFilesystem
}

// MaxClones is the most children of one clone call.
const MaxClones = 100

// CloneSpec asks for children of one sandbox or snapshot. Exactly one of SandboxRef and
// SnapshotRef is set.
type CloneSpec struct {
	SandboxRef  string
	SnapshotRef string
	Count       int // 1 to MaxClones
	// Child is what each child is made with; its TemplateRef, SnapshotRef, Resources,
	// Volumes and IdempotencyKey must be empty. Metadata: nil takes the source's.
	Child SandboxSpec
}

// CloneResult is the outcome for one child: Err is nil or Sandbox is empty.
type CloneResult struct {
	Sandbox Sandbox
	Err     error
}

// Lifecycle is the inbound interface of the engine for what happens to a sandbox between
// its create and its delete. Every verb waits for one that is under way; one that finds
// its work done already succeeds. A verb goes on when its caller leaves.
// Codes of all: NotFound, Invalid, FailedPrecondition (names the phase), Aborted
// (deleted meanwhile), NoSpace, Internal.
type Lifecycle interface {
	// Snapshot freezes a running sandbox for an instant, or takes what a paused one
	// saved, and returns when the snapshot is on the disk.
	Snapshot(ctx context.Context, ref string, spec SnapshotSpec) (Snapshot, error)
	// Clone makes children. The error is that of the whole call; a child that failed
	// says so in its own result.
	Clone(ctx context.Context, spec CloneSpec) ([]CloneResult, error)
	// Rollback puts a sandbox back to one of its snapshots. It keeps its ID, address,
	// token, policy, metadata and time to live. On an error it goes on as it was.
	Rollback(ctx context.Context, ref, snapshotRef string) (Sandbox, error)
	Pause(ctx context.Context, ref string, mode PauseMode) (Sandbox, error)
	// Resume goes on with a paused sandbox. A timeout above zero is its new time to live;
	// zero renews the one of its create.
	Resume(ctx context.Context, ref string, timeout time.Duration) (Sandbox, error)
	// Stop shuts the guest down and keeps its disks; Start boots it cold.
	Stop(ctx context.Context, ref string) (Sandbox, error)
	Start(ctx context.Context, ref string) (Sandbox, error)
}
