// Package flow runs a fixed plan of steps, each with an undo.
//
// A flow is data: stages one after the other, the steps of a stage all at once. The
// same stages serve to create (Run), to delete and to recover after a crash (Unwind).
package flow

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	cube "github.com/cubesandbox/cubelet"
)

// Step is one effect and its reversal.
type Step struct {
	Name string
	// Do makes the effect. On an error it may have made a part of it.
	Do func(context.Context) error
	// Undo removes the effect. It is idempotent and safe when Do never ran or failed
	// half-way. Nil when another step's Undo covers it.
	Undo func(context.Context) error
}

// Stage is a set of steps that run at once.
type Stage []Step

// Runner holds what Run and Unwind need beside the stages.
type Runner struct {
	// UndoTimeout bounds a whole unwind. Killing a large guest takes seconds.
	UndoTimeout time.Duration
	// Now is the clock of the timings.
	Now func() time.Time
}

// Result is what Run did.
type Result struct {
	Timings []cube.StageTiming // in the stages' order
	// UndoErr is what the unwind of a failed run left behind, nil when nothing.
	UndoErr error
}

// Run does the stages in order. When a step fails, the other steps of its stage are
// cancelled and waited for, and every stage that was started is undone, last first,
// even when ctx is done by then. The returned error is the cause of the first failure,
// never that of the unwind. start is the moment from which the timings count.
func (r Runner) Run(ctx context.Context, start time.Time, stages []Stage) (Result, error) {
	var res Result
	for i, st := range stages {
		timings, err := r.runStage(ctx, start, st)
		res.Timings = append(res.Timings, timings...)
		if err != nil {
			res.UndoErr = r.Unwind(ctx, stages[:i+1])
			return res, err
		}
	}
	return res, nil
}

func (r Runner) runStage(ctx context.Context, start time.Time, st Stage) ([]cube.StageTiming, error) {
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	sctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	timings := make([]cube.StageTiming, len(st))
	var (
		wg    sync.WaitGroup
		once  sync.Once
		first error
	)
	for i, s := range st {
		wg.Go(func() {
			begin := r.Now()
			err := s.Do(sctx)
			timings[i] = cube.StageTiming{Stage: s.Name, Start: begin.Sub(start), Duration: r.Now().Sub(begin)}
			if err == nil {
				return
			}
			once.Do(func() {
				first = fmt.Errorf("%s: %w", s.Name, err)
				cancel(first)
			})
		})
	}
	wg.Wait()
	return timings, first
}

// Unwind undoes the stages, last first, and the steps of a stage at once. It goes on
// after a failure and returns all failures joined. It does not stop when ctx is done;
// UndoTimeout bounds it.
func (r Runner) Unwind(ctx context.Context, stages []Stage) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.UndoTimeout)
	defer cancel()
	var all []error
	for i := len(stages) - 1; i >= 0; i-- {
		all = append(all, undoStage(ctx, stages[i]))
	}
	return errors.Join(all...)
}

func undoStage(ctx context.Context, st Stage) error {
	errs := make([]error, len(st))
	var wg sync.WaitGroup
	for i, s := range st {
		if s.Undo == nil {
			continue
		}
		wg.Go(func() {
			if err := s.Undo(ctx); err != nil {
				errs[i] = fmt.Errorf("undo %s: %w", s.Name, err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}
