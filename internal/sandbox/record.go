package sandbox

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
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
