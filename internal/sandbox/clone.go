package sandbox

import (
	"context"
	"maps"
	"sync"

	cube "github.com/cubesandbox/cubelet"
)

// clonesAtOnce is how many children of one call are made at the same time.
const clonesAtOnce = 4

// Clone implements cube.Lifecycle.
func (m *Manager) Clone(ctx context.Context, spec cube.CloneSpec) ([]cube.CloneResult, error) {
	if err := validateClone(spec); err != nil {
		return nil, err
	}
	child := spec.Child
	child.SnapshotRef = spec.SnapshotRef
	if spec.SandboxRef != "" {
		source, err := m.find(spec.SandboxRef)
		if err != nil {
			return nil, err
		}
		s, err := m.snapshot(ctx, source.id, cube.SnapshotSpec{}, false)
		if err != nil {
			return nil, err
		}
		defer m.dropTemporary(ctx, s.ID)
		child.SnapshotRef = s.ID
		if child.Metadata == nil {
			child.Metadata = maps.Clone(source.record().Spec.Metadata)
		}
	}
	results := make([]cube.CloneResult, spec.Count)
	var wg sync.WaitGroup
	limit := make(chan struct{}, clonesAtOnce)
	for i := range results {
		limit <- struct{}{}
		wg.Go(func() {
			defer func() { <-limit }()
			results[i].Sandbox, results[i].Err = m.Create(ctx, child)
		})
	}
	wg.Wait()
	return results, nil
}

// dropTemporary removes the snapshot between a sandbox and its clones. They hold the
// files that they need themselves.
func (m *Manager) dropTemporary(ctx context.Context, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), m.cfg.UndoTimeout)
	defer cancel()
	if err := m.cfg.Snapshots.Delete(ctx, id, true); err != nil {
		m.cfg.Log.Error("delete the snapshot between a sandbox and its clones", "snapshot", id, "err", err)
	}
}

func validateClone(spec cube.CloneSpec) error {
	c := spec.Child
	switch {
	case (spec.SandboxRef == "") == (spec.SnapshotRef == ""):
		return cube.InvalidField("source", "give either a sandbox or a snapshot")
	case spec.Count < 1 || spec.Count > cube.MaxClones:
		return cube.InvalidField("count", "must be between 1 and %d", cube.MaxClones)
	case c.TemplateRef != "" || c.SnapshotRef != "" || c.IdempotencyKey != "" || c.Resources != (cube.Resources{}):
		return cube.InvalidField("child", "a clone has its source's template and size, and no idempotency key")
	}
	return nil
}

var _ cube.Lifecycle = (*Manager)(nil)
