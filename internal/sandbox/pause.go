package sandbox

import (
	"context"
	"errors"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// Pause implements cube.Lifecycle.
func (m *Manager) Pause(ctx context.Context, ref string, mode cube.PauseMode) (cube.Sandbox, error) {
	switch {
	case mode == "":
		mode = cube.PauseFull
	case mode == cube.PauseFilesystem:
		e := cube.Errorf(cube.CodeUnimplemented, "a pause that keeps only the file system is not built yet")
		e.Field = "mode"
		return cube.Sandbox{}, e
	case !mode.Valid():
		return cube.Sandbox{}, cube.InvalidField("mode", "%q is no mode of a pause", mode)
	}
	return m.do(ctx, ref, "pause sandbox", func(ctx context.Context, d *driver) error { return d.pause(ctx, mode) })
}

func (d *driver) pause(ctx context.Context, mode cube.PauseMode) error {
	r := d.record()
	switch {
	case r.Phase == cube.PhasePaused && r.Paused == mode:
		return nil
	case r.Phase == cube.PhasePaused:
		return cube.Errorf(cube.CodeFailedPrecondition, "it is paused already, as %s", r.Paused).WithHint("resume it first")
	case r.Phase != cube.PhaseRunning:
		return errPhase(r)
	case mode == cube.PauseKeepMemory:
		return d.pauseVCPUs(ctx)
	}
	return d.pauseFull(ctx)
}

// pauseVCPUs stops the machine. A crash before it is journaled lets it go on.
func (d *driver) pauseVCPUs(ctx context.Context) error {
	if err := d.m.cfg.VMMs.Pause(ctx, d.record().vmm()); err != nil {
		return err
	}
	err := d.put(ctx, func(r *Record) { r.Phase, r.Paused = cube.PhasePausing, cube.PauseKeepMemory })
	if err == nil {
		err = d.put(ctx, func(r *Record) { r.Phase, r.ExpiresAt = cube.PhasePaused, time.Time{} })
	}
	if err != nil {
		return errors.Join(err, d.goOn())
	}
	return nil
}

// pauseFull saves the machine below the number of the next generation, which will be
// restored from that, and then frees all that it has of the host.
func (d *driver) pauseFull(ctx context.Context) error {
	if err := d.put(ctx, func(r *Record) { r.Phase, r.Paused = cube.PhasePausing, cube.PauseFull }); err != nil {
		return err
	}
	r := d.record()
	memory, state := r.Plan.saved(r.Generation + 1)
	_, err := d.m.cfg.VMMs.Freeze(ctx, r.vmm(), vmm.Freeze{MemoryPath: memory, StatePath: state, Stay: true})
	if err == nil {
		err = d.m.cfg.Disks.Sync(ctx, memory, state, r.Plan.LayerPath)
	}
	if err == nil {
		err = d.put(ctx, func(r *Record) {
			r.Phase, r.ExpiresAt, r.Instance = cube.PhasePaused, time.Time{}, vmm.Instance{}
		})
	}
	if err != nil {
		return errors.Join(err, d.goOn())
	}
	d.watch()
	return d.letGo()
}

// letGo frees the host memory and the network of a sandbox that is paused. What fails is
// logged: the next start tries again.
func (d *driver) letGo() error {
	ctx, cancel := d.undoContext()
	defer cancel()
	err := errors.Join(d.m.cfg.VMMs.Destroy(ctx, d.record().vmm()), d.m.cfg.Network.Release(ctx, d.id))
	if err != nil {
		d.m.cfg.Log.Error("free what a paused sandbox had", "sandbox", d.id, "err", err)
	}
	return nil
}

// goOn lets a machine run again after a verb that failed, and drops what the verb made.
func (d *driver) goOn() error {
	ctx, cancel := d.undoContext()
	defer cancel()
	r := d.record()
	err := d.m.cfg.VMMs.Resume(ctx, r.vmm())
	if err == nil && r.Phase != cube.PhaseRunning {
		err = d.put(ctx, func(r *Record) { r.Phase, r.Paused = cube.PhaseRunning, "" })
	}
	if err != nil {
		d.fail("it could not go on after a verb that failed: " + err.Error())
		return err
	}
	if err := d.dropNeighbours(ctx); err != nil {
		d.m.cfg.Log.Error("drop what a failed verb made", "sandbox", d.id, "err", err)
	}
	return nil
}

// dropNeighbours removes what a crash or a failed unwind left of the generations around
// the one that runs.
func (d *driver) dropNeighbours(ctx context.Context) error {
	r := d.record()
	var errs []error
	for _, n := range []int{r.Generation - 1, r.Generation + 1} {
		if n < 0 {
			continue
		}
		memory, state := r.Plan.saved(n)
		errs = append(errs, d.m.cfg.VMMs.Destroy(ctx, vmmOwner(d.id, n)), d.m.cfg.Disks.Drop(ctx, memory, state, r.Plan.layer(n)))
	}
	return errors.Join(errs...)
}

func (d *driver) undoContext() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(d.m.ctx), d.m.cfg.UndoTimeout)
}

// Resume implements cube.Lifecycle.
func (m *Manager) Resume(ctx context.Context, ref string, timeout time.Duration) (cube.Sandbox, error) {
	if timeout < 0 {
		return cube.Sandbox{}, cube.InvalidField("timeout", "must not be negative")
	}
	return m.do(ctx, ref, "resume sandbox", func(ctx context.Context, d *driver) error { return d.resume(ctx, timeout) })
}

func (d *driver) resume(ctx context.Context, timeout time.Duration) error {
	r := d.record()
	if timeout == 0 {
		timeout = r.Spec.Timeout
	}
	switch {
	case r.Phase == cube.PhaseRunning:
		return nil
	case r.Phase != cube.PhasePaused:
		return errPhase(r)
	}
	if err := d.put(ctx, func(r *Record) { r.Phase = cube.PhaseResuming }); err != nil {
		return err
	}
	if r.Paused == cube.PauseKeepMemory {
		return d.resumeVCPUs(ctx, timeout)
	}
	g := d.generation(change{timeout: timeout})
	g.next.Plan.Machine.MemoryPath, g.next.Plan.Machine.StatePath = r.Plan.saved(g.next.Generation)
	err := d.regenerate(ctx, g)
	if err != nil && d.record().Phase == cube.PhaseResuming {
		undo, cancel := d.undoContext()
		defer cancel()
		return errors.Join(err, d.put(undo, func(r *Record) { r.Phase = cube.PhasePaused }))
	}
	return err
}

// resumeVCPUs lets the machine go on with a clock that is right.
func (d *driver) resumeVCPUs(ctx context.Context, timeout time.Duration) error {
	r := d.record()
	err := d.m.cfg.VMMs.Resume(ctx, r.vmm())
	if err == nil {
		err = d.m.initGuest(ctx, r)
	}
	if err == nil {
		err = d.put(ctx, func(r *Record) {
			r.Phase, r.Paused, r.ExpiresAt = cube.PhaseRunning, "", d.m.expiry(timeout)
		})
	}
	if err == nil {
		return nil
	}
	undo, cancel := d.undoContext()
	defer cancel()
	return errors.Join(err, d.m.cfg.VMMs.Pause(undo, r.vmm()), d.put(undo, func(r *Record) { r.Phase = cube.PhasePaused }))
}
