package sandbox

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// errDeleted is the cause with which a delete cancels a create.
func errDeleted() error { return cube.Errorf(cube.CodeAborted, "deleted while it was being created") }

// driver owns one sandbox: only its goroutine changes the record and the host.
type driver struct {
	m  *Manager
	id string
	// rec is the latest record, nil until the first one is journaled. Whoever changes it
	// stores a new one.
	rec atomic.Pointer[Record]
	// key is the idempotency key that the sandbox was created with.
	key string

	created   chan struct{} // closed when the create has ended
	createErr error         // set before created is closed
	cancel    context.CancelCauseFunc
	createCtx context.Context
	waiters   int  // creates that wait for the result; guarded by m.mu
	delivered bool // some create was told of the sandbox; guarded by m.mu

	deletes chan chan error // requests to delete, answered by the goroutine
	exits   chan vmm.Exit   // at most one: the VMM ended
	gone    chan struct{}   // closed when nothing of the sandbox is left
}

func (m *Manager) newDriver(id string, spec cube.SandboxSpec) *driver {
	d := &driver{
		m:       m,
		id:      id,
		key:     spec.IdempotencyKey,
		created: make(chan struct{}),
		deletes: make(chan chan error),
		exits:   make(chan vmm.Exit, 1),
		gone:    make(chan struct{}),
	}
	d.createCtx, d.cancel = context.WithCancelCause(m.ctx)
	return d
}

func (d *driver) record() *Record { return d.rec.Load() }

// awaitCreated waits for the create. A caller that goes away while others wait leaves
// it alone; the last one to go cancels it.
func (d *driver) awaitCreated(ctx context.Context) (cube.Sandbox, error) {
	select {
	case <-d.created:
	case <-ctx.Done():
		d.leave(ctx)
		return cube.Sandbox{}, &cube.Error{Code: cube.CodeOf(ctx.Err()), Op: "create sandbox", ID: d.id, Err: context.Cause(ctx)}
	}
	d.m.mu.Lock()
	d.waiters--
	d.delivered = d.createErr == nil
	d.m.mu.Unlock()
	if d.createErr != nil {
		return cube.Sandbox{}, d.createErr
	}
	r := d.record()
	if r == nil {
		return cube.Sandbox{}, &cube.Error{Code: cube.CodeAborted, Op: "create sandbox", ID: d.id, Err: errDeleted()}
	}
	return r.sandbox(), nil
}

// leave is for a caller that stops waiting. It returns when nothing is left of a
// sandbox that nobody waits for, except when the delete fails, which is logged.
func (d *driver) leave(ctx context.Context) {
	d.m.mu.Lock()
	d.waiters--
	last := d.waiters == 0 && !d.delivered
	d.m.mu.Unlock()
	if !last {
		return
	}
	d.cancel(context.Cause(ctx))
	<-d.created
	if d.createErr != nil {
		return
	}
	// It was finished in the same moment: nobody knows of it.
	if err := d.requestDelete(context.WithoutCancel(ctx)); err != nil {
		d.m.cfg.Log.Error("delete of a sandbox whose caller left", "sandbox", d.id, "err", err)
	}
}

// requestDelete asks the goroutine to delete the sandbox and waits for the outcome.
// The delete goes on when the caller leaves.
func (d *driver) requestDelete(ctx context.Context) error {
	d.cancel(errDeleted())
	reply := make(chan error, 1)
	select {
	case d.deletes <- reply:
	case <-d.gone:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-d.m.ctx.Done():
		return cube.Errorf(cube.CodeUnavailable, "the daemon is shutting down")
	}
	select {
	case err := <-reply:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// runCreate makes the sandbox, then serves it. It is the driver's goroutine.
func (d *driver) runCreate(spec cube.SandboxSpec) {
	err := d.create(d.createCtx, spec)
	d.cancel(nil)
	if err != nil {
		d.createErr = err
		if r := d.record(); r == nil || r.Phase != cube.PhaseFailed {
			d.m.forget(d, d.key, Key{})
			close(d.gone)
			close(d.created)
			return
		}
	}
	close(d.created)
	d.serve()
}

// serve waits for what can happen to a sandbox that exists.
func (d *driver) serve() {
	watch, stopWatch := context.WithCancel(d.m.ctx)
	defer stopWatch()
	if d.record().Phase == cube.PhaseRunning {
		d.m.wg.Go(func() { d.watchVMM(watch) })
	}
	ttl := newExpiry(d.record().ExpiresAt, d.m.cfg.Now())
	defer ttl.Stop()
	for {
		select {
		case <-d.m.ctx.Done():
			return
		case reply := <-d.deletes:
			err := d.delete("asked to")
			if err == nil {
				close(d.gone)
			}
			reply <- err
		case <-ttl.C:
			if err := d.delete("its time to live ended"); err != nil {
				d.m.cfg.Log.Error("delete of an expired sandbox; will retry", "sandbox", d.id, "err", err)
				ttl.Reset(d.m.cfg.RetryDelete)
				continue
			}
			close(d.gone)
		case e := <-d.exits:
			d.fail(fmt.Sprintf("the VMM ended with code %d%s", e.Code, d.consoleTail()))
		}
		if d.isGone() {
			return
		}
	}
}

func (d *driver) isGone() bool {
	select {
	case <-d.gone:
		return true
	default:
		return false
	}
}

// newExpiry returns a timer for the moment; for the zero moment one that never fires.
func newExpiry(at, now time.Time) *time.Timer {
	if at.IsZero() {
		t := time.NewTimer(time.Hour)
		t.Stop()
		return t
	}
	return time.NewTimer(at.Sub(now))
}

// watchVMM reports the end of the VMM. A Wait that breaks for another reason, such as
// a lost connection to containerd, is taken up again.
func (d *driver) watchVMM(ctx context.Context) {
	for {
		exit, err := d.m.cfg.VMMs.Wait(ctx, d.id)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			d.exits <- exit
			return
		case cube.IsNotFound(err):
			d.exits <- vmm.Exit{Owner: d.id, Code: -1, Time: d.m.cfg.Now()}
			return
		}
		d.m.cfg.Log.Warn("wait for a VMM", "sandbox", d.id, "err", err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Second):
		}
	}
}

// put journals a changed copy of the record and makes it the latest.
func (d *driver) put(ctx context.Context, change func(*Record)) error {
	r := *d.record()
	change(&r)
	if old := d.record().Phase; r.Phase != old && !old.CanMoveTo(r.Phase) {
		return cube.Errorf(cube.CodeInternal, "sandbox %s cannot move from %s to %s", d.id, old, r.Phase)
	}
	if err := d.m.cfg.Records.Put(ctx, r); err != nil {
		return fmt.Errorf("journal sandbox %s: %w", d.id, err)
	}
	d.rec.Store(&r)
	return nil
}

// fail marks the sandbox as failed and frees its VMM slot. Its disk stays for its
// owner to look at until the delete.
func (d *driver) fail(reason string) {
	d.m.cfg.Log.Warn("sandbox failed", "sandbox", d.id, "reason", reason)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(d.m.ctx), d.m.cfg.UndoTimeout)
	defer cancel()
	err := d.put(ctx, func(r *Record) {
		r.Phase, r.Reason = cube.PhaseFailed, reason
		r.Instance = vmm.Instance{}
	})
	err = errors.Join(err, d.m.cfg.VMMs.Destroy(ctx, d.id))
	if err != nil {
		d.m.cfg.Log.Error("put a failed sandbox away", "sandbox", d.id, "err", err)
	}
}

// delete unwinds the steps and drops the record. When something is left, the sandbox
// is failed with the reason, and a later delete tries again.
func (d *driver) delete(why string) error {
	ctx := context.WithoutCancel(d.m.ctx)
	if d.record().Phase != cube.PhaseDeleting {
		if err := d.put(ctx, func(r *Record) { r.Phase, r.Reason = cube.PhaseDeleting, why }); err != nil {
			return err
		}
	}
	if err := d.m.flow.Unwind(ctx, d.m.steps(d.record(), &effects{})); err != nil {
		left := d.put(ctx, func(r *Record) { r.Phase, r.Reason = cube.PhaseFailed, "delete left something: "+err.Error() })
		return &cube.Error{Op: "delete sandbox", ID: d.id, Err: errors.Join(err, left)}
	}
	r := d.record()
	var tombstone Key
	if d.key != "" {
		sum, err := digest(r.Spec)
		if err != nil {
			return err
		}
		tombstone = Key{Digest: sum, SandboxID: d.id, DeletedAt: d.m.cfg.Now()}
	}
	if err := d.m.cfg.Records.Delete(ctx, d.id, d.key, tombstone); err != nil {
		return fmt.Errorf("journal the delete of sandbox %s: %w", d.id, err)
	}
	d.m.cfg.Templates.Release(r.Plan.Image.TemplateID, d.id)
	d.m.forget(d, d.key, tombstone)
	d.m.cfg.Log.Info("sandbox deleted", "sandbox", d.id, "why", why)
	return nil
}
