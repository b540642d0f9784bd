package sandbox

import (
	"context"
	"errors"
	"time"

	cube "github.com/cubesandbox/cubelet"
)

// errDeletedMeanwhile is the cause with which a delete ends a verb.
func errDeletedMeanwhile() error { return cube.Errorf(cube.CodeAborted, "deleted meanwhile") }

// verb is something that the driver's goroutine is asked to do.
type verb struct {
	name string // as the operation of its error
	ctx  context.Context
	do   func(context.Context) error
	done chan struct{}
	err  error // set before done is closed
}

// ask has the goroutine do something and waits for the end. It goes on when the caller
// leaves.
func (d *driver) ask(ctx context.Context, name string, do func(context.Context) error) error {
	v := &verb{name: name, ctx: d.m.ctx, do: do, done: make(chan struct{})}
	select {
	case d.verbs <- v:
	case <-d.gone:
		return &cube.Error{Code: cube.CodeNotFound, Op: name, ID: d.id, Err: errors.New("no such sandbox")}
	case <-ctx.Done():
		return &cube.Error{Code: cube.CodeOf(ctx.Err()), Op: name, ID: d.id, Err: context.Cause(ctx)}
	case <-d.m.ctx.Done():
		return cube.Errorf(cube.CodeUnavailable, "the daemon is shutting down")
	}
	select {
	case <-v.done:
		return v.err
	case <-ctx.Done():
		return &cube.Error{Code: cube.CodeOf(ctx.Err()), Op: name, ID: d.id, Err: context.Cause(ctx)}
	}
}

// perform does a verb in the driver's goroutine.
func (d *driver) perform(v *verb) error {
	ctx, stop := context.WithCancelCause(v.ctx)
	defer stop(nil)
	d.interrupt.Store(&stop)
	defer d.interrupt.Store(nil)
	ctx, cancel := context.WithTimeout(ctx, d.m.cfg.VerbTimeout)
	defer cancel()
	begin := d.m.cfg.Now()
	err := v.do(ctx)
	if err == nil {
		d.m.cfg.Log.Info(v.name, "sandbox", d.id, "took", d.m.cfg.Now().Sub(begin).Round(time.Microsecond))
		return nil
	}
	if c := context.Cause(ctx); c != nil && !errors.Is(err, c) {
		err = c
	}
	return explainError(v.name, d.id, err)
}

// explainError gives an error its operation and keeps what is known of its cause.
func explainError(op, id string, err error) error {
	e := &cube.Error{Code: cube.CodeOf(err), Op: op, ID: id, Err: err}
	var inner *cube.Error
	if errors.As(err, &inner) {
		e.Field, e.Hint = inner.Field, inner.Hint
	}
	return e
}

// errPhase refuses a verb in a phase that it has no sense in.
func errPhase(r *Record) error {
	e := cube.Errorf(cube.CodeFailedPrecondition, "it is %s", r.Phase)
	switch {
	case r.Reason != "":
		return e.WithHint("%s", r.Reason)
	case r.Phase == cube.PhasePaused:
		return e.WithHint("resume it first")
	}
	return e
}

// do finds the sandbox, has its goroutine do something, and returns how it is then.
func (m *Manager) do(ctx context.Context, ref, name string, f func(context.Context, *driver) error) (cube.Sandbox, error) {
	d, err := m.find(ref)
	if err != nil {
		return cube.Sandbox{}, err
	}
	if err := d.ask(ctx, name, func(ctx context.Context) error { return f(ctx, d) }); err != nil {
		return cube.Sandbox{}, err
	}
	return d.record().sandbox(), nil
}
