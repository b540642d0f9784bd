package sandbox

import (
	"context"
	"crypto/rand"
	"encoding/base32"
	"errors"
	"path/filepath"
	"strings"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// Snapshot implements cube.Lifecycle.
func (m *Manager) Snapshot(ctx context.Context, ref string, spec cube.SnapshotSpec) (cube.Snapshot, error) {
	return m.snapshot(ctx, ref, spec, true)
}

// snapshot takes a snapshot; parent tells whether it is the parent of later ones.
func (m *Manager) snapshot(ctx context.Context, ref string, spec cube.SnapshotSpec, parent bool) (cube.Snapshot, error) {
	if spec.ID == "" {
		spec.ID = newSnapshotID()
	}
	// A caller that leaves must not read what the goroutine still writes.
	taken := make(chan cube.Snapshot, 1)
	_, err := m.do(ctx, ref, "snapshot sandbox", func(ctx context.Context, d *driver) error {
		s, err := d.snapshot(ctx, spec)
		if err == nil && parent {
			err = d.put(context.WithoutCancel(ctx), func(r *Record) { r.ParentID = s.ID })
		}
		taken <- s
		return err
	})
	if err != nil {
		return cube.Snapshot{}, err
	}
	return <-taken, nil
}

// newSnapshotID draws an ID of 100 random bits.
func newSnapshotID() string {
	b := make([]byte, 13)
	rand.Read(b) // never fails, see its documentation
	return "snap-" + strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(b))[:20]
}

func (d *driver) snapshot(ctx context.Context, spec cube.SnapshotSpec) (cube.Snapshot, error) {
	r := d.record()
	if r.Phase != cube.PhaseRunning && r.Phase != cube.PhasePaused {
		return cube.Snapshot{}, errPhase(r)
	}
	s := cube.Snapshot{
		ID: spec.ID, Name: spec.Name, ParentID: r.ParentID, SandboxID: r.ID, TemplateID: r.Plan.Image.TemplateID,
		Resources: r.Plan.Image.Resources, CreatedAt: d.m.cfg.Now().UTC(),
	}
	dir, err := d.m.cfg.Snapshots.Begin(ctx, s)
	if err != nil {
		return s, err
	}
	img := r.Plan.Image
	img.SnapshotID, img.GuestToken, img.Env = s.ID, r.Plan.Guest.AccessToken, r.Plan.Guest.Env
	img.RootPath, img.LayerPath = filepath.Join(dir, "root"), filepath.Join(dir, "layer")
	img.MemoryPath, img.StatePath = filepath.Join(dir, "memory"), filepath.Join(dir, "state")
	if err := d.capture(ctx, r, &img, &s); err != nil {
		return s, d.discard(s.ID, err)
	}
	s, err = d.m.cfg.Snapshots.Publish(ctx, s, img)
	if err != nil {
		return s, d.discard(s.ID, err)
	}
	return s, nil
}

func (d *driver) discard(id string, cause error) error {
	ctx, cancel := d.undoContext()
	defer cancel()
	if err := d.m.cfg.Snapshots.Discard(ctx, id); err != nil {
		return errors.Join(cause, err)
	}
	return cause
}

// capture makes the files of a snapshot.
func (d *driver) capture(ctx context.Context, r *Record, img *Image, s *cube.Snapshot) error {
	disks := d.m.cfg.Disks
	if err := disks.Link(ctx, r.Plan.Machine.Disks[0].Path, img.RootPath); err != nil {
		return err
	}
	if r.paused() == cube.PauseFull {
		memory, state := r.Plan.saved(r.Generation + 1)
		return errors.Join(
			disks.Clone(ctx, memory, img.MemoryPath),
			disks.Clone(ctx, state, img.StatePath),
			disks.Clone(ctx, r.Plan.LayerPath, img.LayerPath),
		)
	}
	// What is on the disk already need not be written while the guest stands still.
	if err := disks.Flush(ctx, r.Plan.LayerPath); err != nil {
		return err
	}
	frozen, err := d.m.cfg.VMMs.Freeze(ctx, r.vmm(), vmm.Freeze{
		MemoryPath: img.MemoryPath, StatePath: img.StatePath,
		WhileFrozen: func() error { return disks.Clone(ctx, r.Plan.LayerPath, img.LayerPath) },
		Stay:        r.Phase == cube.PhasePaused,
	})
	if err != nil {
		return err
	}
	s.DirtyBytes = frozen.DirtyBytes
	if r.Phase == cube.PhaseRunning {
		s.Frozen = frozen.Paused
	}
	for _, t := range frozen.Timings {
		s.Timings = append(s.Timings, cube.StageTiming{Stage: t.Name, Duration: t.Duration})
	}
	return nil
}

// Rollback implements cube.Lifecycle.
func (m *Manager) Rollback(ctx context.Context, ref, snapshotRef string) (cube.Sandbox, error) {
	if snapshotRef == "" {
		return cube.Sandbox{}, cube.InvalidField("snapshot_id", "is required")
	}
	return m.do(ctx, ref, "roll back sandbox", func(ctx context.Context, d *driver) error { return d.rollback(ctx, snapshotRef) })
}

func (d *driver) rollback(ctx context.Context, ref string) error {
	r := d.record()
	if r.Phase != cube.PhaseRunning {
		return errPhase(r)
	}
	// The hold is for the duration of the verb, under a name of its own: the sandbox may
	// hold the same snapshot as what it was made from.
	user := r.ID + "/rollback"
	s, img, err := d.m.cfg.Snapshots.Acquire(ctx, ref, user)
	if err != nil {
		return err
	}
	defer d.m.cfg.Snapshots.Release(s.ID, user)
	if s.SandboxID != r.ID {
		e := cube.Errorf(cube.CodeFailedPrecondition, "snapshot %s is of another sandbox, %s", s.ID, s.SandboxID)
		return e.WithHint("make a sandbox from it: cubecli sandbox clone %s", s.ID)
	}
	g := d.generation(change{layer: img.LayerPath, rollback: true, snapshot: s.ID})
	// Names of its own keep the files when the snapshot is deleted.
	memory, state := r.Plan.saved(g.next.Generation)
	g.next.Plan.Machine.MemoryPath, g.next.Plan.Machine.StatePath = memory, state
	if err := d.put(ctx, func(r *Record) { r.Phase = cube.PhaseResuming }); err != nil {
		return err
	}
	err = d.m.cfg.Disks.Drop(ctx, memory, state)
	if err == nil {
		err = errors.Join(d.m.cfg.Disks.Link(ctx, img.MemoryPath, memory), d.m.cfg.Disks.Link(ctx, img.StatePath, state))
	}
	if err == nil {
		err = d.regenerate(ctx, g)
	}
	if err != nil && d.record().Phase == cube.PhaseResuming {
		return errors.Join(err, d.goOn())
	}
	return err
}
