package sandbox

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"strconv"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// Record is what the journal holds of one sandbox. The record is written before the
// first effect and again when the sandbox runs.
type Record struct {
	ID        string             `json:"id"`
	Phase     cube.Phase         `json:"phase"`
	Reason    string             `json:"reason,omitempty"`
	Spec      cube.SandboxSpec   `json:"spec"`
	Plan      Plan               `json:"plan"`
	Instance  vmm.Instance       `json:"instance,omitzero"` // set when running
	CreatedAt time.Time          `json:"createdAt"`
	ExpiresAt time.Time          `json:"expiresAt,omitzero"`
	Timings   []cube.StageTiming `json:"timings,omitempty"`

	// Generation counts the VMMs that the sandbox has had; see Plan.next.
	Generation int `json:"generation,omitempty"`
	// Paused is how a paused or pausing sandbox was paused.
	Paused cube.PauseMode `json:"paused,omitempty"`
	// SnapshotID is the snapshot that the sandbox was made from or rolled back to last.
	SnapshotID string `json:"snapshotId,omitempty"`
	// ParentID is the snapshot that its memory comes from or that was taken of it last.
	ParentID string `json:"parentId,omitempty"`
}

// vmm is the owner of the VMM slot: each generation has its own, so that the next one can
// start while the one before it stands still.
func (r *Record) vmm() string { return vmmOwner(r.ID, r.Generation) }

func vmmOwner(id string, generation int) string {
	if generation == 0 {
		return id
	}
	return id + "-g" + strconv.Itoa(generation)
}

// paused tells how the sandbox is paused, or nothing.
func (r *Record) paused() cube.PauseMode {
	if r.Phase != cube.PhasePaused {
		return ""
	}
	return r.Paused
}

// Key is a remembered idempotency key of a create.
type Key struct {
	Digest    string `json:"digest"` // of the request it came with
	SandboxID string `json:"sandboxId"`
	// DeletedAt is when the sandbox was deleted, zero while it lives. The key is kept
	// for a while then, so that a late retry does not bring the sandbox back.
	DeletedAt time.Time `json:"deletedAt,omitzero"`
}

// Records is the durable store of records and keys. Every method returns after the
// data is on disk.
type Records interface {
	Load(ctx context.Context) (map[string]Record, map[string]Key, error)
	// Create writes a new record and, when key is not empty, its key in one transaction.
	Create(ctx context.Context, r Record, key string, k Key) error
	Put(ctx context.Context, r Record) error
	// Delete removes the record and, when key is not empty, writes k as its tombstone; a
	// zero k removes the key.
	Delete(ctx context.Context, id, key string, k Key) error
	// DropKeys forgets keys.
	DropKeys(ctx context.Context, keys []string) error
}

// digest identifies a request, apart from its idempotency key.
func digest(spec cube.SandboxSpec) (string, error) {
	spec.IdempotencyKey = ""
	b, err := json.Marshal(spec) // map keys are sorted
	if err != nil {
		return "", cube.Errorf(cube.CodeInternal, "encode request: %w", err)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:]), nil
}

// sandbox renders the record as the domain type.
func (r *Record) sandbox() cube.Sandbox {
	return cube.Sandbox{
		ID:           r.ID,
		Phase:        r.Phase,
		Reason:       r.Reason,
		TemplateID:   r.Plan.Image.TemplateID,
		SnapshotID:   r.SnapshotID,
		OnTimeout:    r.Spec.OnTimeout,
		Paused:       r.paused(),
		Resources:    r.Plan.Image.Resources,
		Metadata:     r.Spec.Metadata,
		Network:      r.Spec.Network,
		CreatedAt:    r.CreatedAt,
		ExpiresAt:    r.ExpiresAt,
		GuestAddress: r.Plan.GuestAddress,
		PID:          r.Instance.Process.PID,
		Timings:      r.Timings,
	}
}
