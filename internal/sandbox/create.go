package sandbox

import (
	"context"
	"errors"
	"time"

	cube "github.com/cubesandbox/cubelet"
)

// stopwatch collects the timings of stages that are not flow steps.
type stopwatch struct {
	now     func() time.Time
	start   time.Time
	timings []cube.StageTiming
}

func (s *stopwatch) time(stage string, f func() error) error {
	begin := s.now()
	err := f()
	s.timings = append(s.timings, cube.StageTiming{Stage: stage, Start: begin.Sub(s.start), Duration: s.now().Sub(begin)})
	return err
}

// create makes the sandbox. On an error nothing is left, or the record is failed and
// says what is.
func (d *driver) create(ctx context.Context, spec cube.SandboxSpec) error {
	m := d.m
	sw := &stopwatch{now: m.cfg.Now, start: m.cfg.Now()}
	var img Image
	err := sw.time("template", func() (err error) {
		img, err = m.acquire(ctx, spec, d.id)
		return err
	})
	if err != nil {
		return d.createError(ctx, err)
	}
	if err := d.createFrom(ctx, spec, img, sw); err != nil {
		if r := d.record(); r == nil || r.Phase != cube.PhaseFailed {
			m.release(&img, d.id)
		}
		return d.createError(ctx, err)
	}
	m.cfg.Log.Info("sandbox created", "sandbox", d.id, "template", img.TemplateID, "took", m.cfg.Now().Sub(sw.start))
	return nil
}

// acquire returns the image that the request asks for and marks it as used.
func (m *Manager) acquire(ctx context.Context, spec cube.SandboxSpec, user string) (Image, error) {
	if spec.SnapshotRef == "" {
		return m.cfg.Templates.Acquire(ctx, spec.TemplateRef, spec.Resources, user)
	}
	_, img, err := m.cfg.Snapshots.Acquire(ctx, spec.SnapshotRef, user)
	return img, err
}

// release undoes acquire, and hold is acquire for a sandbox that is found in the journal.
func (m *Manager) release(img *Image, user string) {
	if img.SnapshotID != "" {
		m.cfg.Snapshots.Release(img.SnapshotID, user)
		return
	}
	m.cfg.Templates.Release(img.TemplateID, user)
}

func (m *Manager) hold(img *Image, user string) {
	if img.SnapshotID != "" {
		m.cfg.Snapshots.Hold(img.SnapshotID, user)
		return
	}
	m.cfg.Templates.Hold(img.TemplateID, user)
}

// expiry is the end of a time to live that begins now; zero for none.
func (m *Manager) expiry(timeout time.Duration) time.Time {
	if timeout <= 0 {
		return time.Time{}
	}
	return m.cfg.Now().UTC().Add(timeout)
}

func (d *driver) createFrom(ctx context.Context, spec cube.SandboxSpec, img Image, sw *stopwatch) error {
	m := d.m
	p, err := plan(spec, newIdentity(d.id), img, m.cfg.Node)
	if err != nil {
		return err
	}
	r := Record{
		ID: d.id, Phase: cube.PhaseCreating, Spec: spec, Plan: p, CreatedAt: m.cfg.Now().UTC(),
		SnapshotID: img.SnapshotID, ParentID: img.SnapshotID,
	}
	if err := sw.time("journal", func() error { return d.journalCreate(ctx, r) }); err != nil {
		return err
	}
	d.rec.Store(&r)

	var e effects
	defer e.close()
	stages := m.steps(&r, &e)
	res, err := m.flow.Run(ctx, sw.start, stages)
	sw.timings = append(sw.timings, res.Timings...)
	if err != nil {
		return d.abandon(ctx, err, res.UndoErr)
	}
	err = sw.time("commit", func() error {
		// The guest runs: from here the caller's leaving no longer undoes it half-way.
		return d.put(context.WithoutCancel(ctx), func(r *Record) {
			r.Phase, r.Instance = cube.PhaseRunning, e.instance
			r.ExpiresAt = m.expiry(spec.Timeout)
			r.Timings = sw.timings
		})
	})
	if err != nil {
		return d.abandon(ctx, err, m.flow.Unwind(ctx, stages))
	}
	r = *d.record()
	r.Timings = sw.timings // with the commit itself, which its own record cannot hold
	d.rec.Store(&r)
	return nil
}

func (d *driver) journalCreate(ctx context.Context, r Record) error {
	var k Key
	if d.key != "" {
		sum, err := digest(r.Spec)
		if err != nil {
			return err
		}
		k = Key{Digest: sum, SandboxID: d.id}
	}
	return d.m.cfg.Records.Create(ctx, r, d.key, k)
}

// abandon drops the record of a create that was unwound. When the unwind left
// something, the sandbox stays as failed, for a delete to try again.
func (d *driver) abandon(ctx context.Context, cause, undoErr error) error {
	ctx = context.WithoutCancel(ctx)
	if undoErr == nil {
		undoErr = d.m.cfg.Records.Delete(ctx, d.id, d.key, Key{})
	}
	if undoErr == nil {
		d.rec.Store(nil)
		return cause
	}
	d.m.cfg.Log.Error("unwind of a create", "sandbox", d.id, "cause", cause, "err", undoErr)
	reason := cause.Error() + "; the unwind left: " + undoErr.Error()
	if err := d.put(ctx, func(r *Record) { r.Phase, r.Reason = cube.PhaseFailed, reason }); err != nil {
		// The journal still says creating: the next start unwinds it.
		r := *d.record()
		r.Phase, r.Reason = cube.PhaseFailed, reason
		d.rec.Store(&r)
	}
	return cause
}

// createError gives the error its place. When the create was cancelled, the cause of
// the cancel is the error, whatever step noticed it.
func (d *driver) createError(ctx context.Context, err error) error {
	if c := context.Cause(ctx); c != nil && !errors.Is(err, c) {
		err = c
	}
	e := &cube.Error{Code: cube.CodeOf(err), Op: "create sandbox", ID: d.id, Err: err}
	var inner *cube.Error
	if errors.As(err, &inner) {
		e.Field, e.Hint = inner.Field, inner.Hint
	}
	return e
}
