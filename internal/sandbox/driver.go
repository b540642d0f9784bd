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
	verbs   chan *verb      // requests to do something else, one after the other
	exits   chan vmm.Exit   // a VMM ended; Owner tells which
	gone    chan struct{}   // closed when nothing of the sandbox is left

	// interrupt ends the verb under way, when there is one.
	interrupt atomic.Pointer[context.CancelCauseFunc]
	unwatch   context.CancelFunc // ends watchVMM; of the goroutine
}

func (m *Manager) newDriver(id string, spec cube.SandboxSpec) *driver {
	d := &driver{
		m:       m,
		id:      id,
		key:     spec.IdempotencyKey,
		created: make(chan struct{}),
		deletes: make(chan chan error),
		verbs:   make(chan *verb),
		exits:   make(chan vmm.Exit),
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
	if stop := d.interrupt.Load(); stop != nil {
		(*stop)(errDeletedMeanwhile())
	}
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
	d.watch()
	defer func() { d.unwatch() }()
	ttl := newExpiry(d.record().ExpiresAt, d.m.cfg.Now())
	defer func() { ttl.Stop() }()
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
		case v := <-d.verbs:
			v.err = d.perform(v)
			close(v.done)
			ttl.Stop()
			ttl = newExpiry(d.record().ExpiresAt, d.m.cfg.Now())
		case <-ttl.C:
			if retry := d.expire(); retry {
				ttl.Reset(d.m.cfg.RetryDelete)
			}
		case e := <-d.exits:
			if e.Owner == d.record().vmm() {
				d.fail(fmt.Sprintf("the VMM ended with code %d%s", e.Code, d.consoleTail()))
			}
		}
		if d.isGone() {
			return
		}
	}
}

// expire does what is to be done at the end of the time to live, and reports whether it
// failed.
func (d *driver) expire() (retry bool) {
	r := d.record()
	if r.Spec.OnTimeout == cube.OnTimeoutPause && r.Phase == cube.PhaseRunning {
		v := &verb{ctx: d.m.ctx, name: "pause sandbox", do: func(ctx context.Context) error { return d.pause(ctx, cube.PauseFull) }}
		if err := d.perform(v); err != nil {
			d.m.cfg.Log.Error("pause of an expired sandbox; will retry", "sandbox", d.id, "err", err)
			return d.record().Phase == cube.PhaseRunning
		}
		return false
	}
	if err := d.delete("its time to live ended"); err != nil {
		d.m.cfg.Log.Error("delete of an expired sandbox; will retry", "sandbox", d.id, "err", err)
		return true
	}
	close(d.gone)
	return false
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

// watch looks out for the end of the VMM of this generation, and of no other any more.
func (d *driver) watch() {
	if d.unwatch != nil {
		d.unwatch()
	}
	ctx, cancel := context.WithCancel(d.m.ctx)
	d.unwatch = cancel
	r := d.record()
	if r.Phase == cube.PhaseRunning || r.paused() == cube.PauseKeepMemory {
		owner := r.vmm()
		d.m.wg.Go(func() { d.watchVMM(ctx, owner) })
	}
}

// watchVMM reports the end of the VMM. A Wait that breaks for another reason, such as
// a lost connection to containerd, is taken up again.
func (d *driver) watchVMM(ctx context.Context, owner string) {
	for {
		exit, err := d.m.cfg.VMMs.Wait(ctx, owner)
		if cube.IsNotFound(err) {
			exit, err = vmm.Exit{Code: -1, Time: d.m.cfg.Now()}, nil
		}
		if err == nil {
			exit.Owner = owner
			select {
			case d.exits <- exit:
			case <-ctx.Done():
			}
			return
		}
		if ctx.Err() != nil {
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
	err = errors.Join(err, d.m.cfg.VMMs.Destroy(ctx, d.record().vmm()))
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
	d.m.release(&r.Plan.Image, d.id)
	d.m.forget(d, d.key, tombstone)
	d.m.cfg.Log.Info("sandbox deleted", "sandbox", d.id, "why", why)
	return nil
}
