package sandbox

import (
	"context"
	"errors"
	"os"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/flow"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// change is what the next generation differs in.
type change struct {
	timeout  time.Duration // its time to live; ignored when keepsTime
	layer    string        // file that its writable layer is a copy of; empty: the present layer
	rollback bool          // it takes the present VMM's network over and keeps the time to live
	snapshot string        // that it goes back to
}

// generation is the next VMM of a sandbox, while it is made.
type generation struct {
	change
	next     Record
	old      Record
	tap      *os.File
	instance vmm.Instance
}

// generation plans the next VMM. What it restores is the caller's to set.
func (d *driver) generation(c change) *generation {
	g := &generation{change: c, old: *d.record()}
	g.next = g.old
	g.next.Generation++
	g.next.Plan = g.old.Plan.next(g.next.Generation)
	if g.layer == "" {
		g.layer = g.old.Plan.LayerPath
	}
	return g
}

// stages are the effects of a generation. Their undo leaves the one before as it was.
func (m *Manager) stages(g *generation) []flow.Stage {
	c, id, owner, p := &m.cfg, g.next.ID, g.next.vmm(), &g.next.Plan
	network := flow.Step{
		Name: "network",
		Do: func(ctx context.Context) (err error) {
			g.tap, err = c.Network.Claim(ctx, id, g.next.Spec.Network)
			return err
		},
		Undo: func(ctx context.Context) error { return c.Network.Release(ctx, id) },
	}
	if g.rollback {
		network.Do = func(ctx context.Context) (err error) {
			g.tap, err = c.VMMs.Tap(ctx, g.old.vmm())
			return err
		}
		network.Undo = nil
	}
	destroy := func(ctx context.Context) error { return c.VMMs.Destroy(ctx, owner) }
	first := flow.Stage{
		{Name: "vmm-slot", Undo: destroy, Do: func(ctx context.Context) error {
			_, err := c.VMMs.Claim(ctx, owner, p.Limits)
			return err
		}},
		network,
		{
			Name: "disk",
			Do:   func(ctx context.Context) error { return c.Disks.Clone(ctx, g.layer, p.LayerPath) },
			Undo: func(ctx context.Context) error { return c.Disks.Drop(ctx, p.LayerPath) },
		},
	}
	launch := flow.Step{Name: "restore", Undo: destroy, Do: func(ctx context.Context) (err error) {
		if g.rollback {
			if err := c.VMMs.Pause(ctx, g.old.vmm()); err != nil {
				return err
			}
		}
		g.instance, err = c.VMMs.Launch(ctx, owner, p.Machine, g.tap)
		return err
	}}
	agent := flow.Step{Name: "agent", Do: func(ctx context.Context) error { return m.initGuest(ctx, &g.next) }}
	return []flow.Stage{first, {launch}, {agent}}
}

// regenerate makes the next generation run and removes the one before it. On an error
// nothing of the new one is left, and the phase is the caller's to set.
func (d *driver) regenerate(ctx context.Context, g *generation) error {
	stages := d.m.stages(g)
	defer func() {
		if g.tap != nil {
			g.tap.Close()
		}
	}()
	// What a crash or a failed unwind left of an earlier try.
	if err := d.m.cfg.Disks.Drop(ctx, g.next.Plan.LayerPath); err != nil {
		return err
	}
	res, err := d.m.flow.Run(ctx, d.m.cfg.Now(), stages)
	if err == nil {
		// The guest runs: from here nobody's leaving undoes it half-way.
		err = d.put(context.WithoutCancel(ctx), g.commit(d.m))
		if err != nil {
			undo, cancel := d.undoContext()
			defer cancel()
			res.UndoErr = d.m.flow.Unwind(undo, stages)
		}
	}
	if err != nil {
		return d.notUnwound(err, res.UndoErr)
	}
	d.watch()
	d.dropOld(g)
	return nil
}

// commit changes the record to the new generation's.
func (g *generation) commit(m *Manager) func(*Record) {
	return func(r *Record) {
		r.Phase, r.Paused = cube.PhaseRunning, ""
		r.Generation, r.Plan, r.Instance = g.next.Generation, g.next.Plan, g.instance
		if g.rollback {
			r.SnapshotID, r.ParentID = g.snapshot, g.snapshot
			return
		}
		r.ExpiresAt = m.expiry(g.timeout)
	}
}

// notUnwound fails the sandbox when the unwind of a verb left something.
func (d *driver) notUnwound(cause, undoErr error) error {
	if undoErr != nil {
		d.fail("a verb failed (" + cause.Error() + ") and its unwind left: " + undoErr.Error())
	}
	return cause
}

// dropOld removes the generation before. What fails is logged: the next start and the
// delete of the sandbox remove it too.
func (d *driver) dropOld(g *generation) {
	ctx, cancel := d.undoContext()
	defer cancel()
	err := d.m.cfg.VMMs.Destroy(ctx, g.old.vmm())
	err = errors.Join(err, d.m.cfg.Disks.Drop(ctx, g.old.Plan.own()...))
	if err != nil {
		d.m.cfg.Log.Error("remove the generation before", "sandbox", d.id, "err", err)
	}
}
