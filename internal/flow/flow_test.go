package flow

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func runner() Runner { return Runner{UndoTimeout: time.Minute, Now: time.Now} }

// trace records which effects are in force and in which order they were undone.
type trace struct {
	mu     sync.Mutex
	done   map[string]bool
	undone []string
}

func (tr *trace) step(name string, do func(context.Context) error) Step {
	return Step{
		Name: name,
		Do: func(ctx context.Context) error {
			tr.mu.Lock()
			tr.done[name] = true
			tr.mu.Unlock()
			if do != nil {
				return do(ctx)
			}
			return nil
		},
		Undo: func(context.Context) error {
			tr.mu.Lock()
			defer tr.mu.Unlock()
			delete(tr.done, name)
			tr.undone = append(tr.undone, name)
			return nil
		},
	}
}

func TestRunUndoesStartedStagesLastFirst(t *testing.T) {
	boom := errors.New("boom")
	names := []string{"a", "b", "c", "d"}
	for failAt := range names {
		t.Run(names[failAt], func(t *testing.T) {
			tr := &trace{done: map[string]bool{}}
			var stages []Stage
			for i, n := range names {
				var do func(context.Context) error
				if i == failAt {
					do = func(context.Context) error { return boom }
				}
				stages = append(stages, Stage{tr.step(n, do)})
			}
			res, err := runner().Run(t.Context(), time.Now(), stages)
			if !errors.Is(err, boom) || res.UndoErr != nil {
				t.Fatalf("err = %v, undo = %v; want boom, nil", err, res.UndoErr)
			}
			if len(tr.done) != 0 {
				t.Errorf("left behind: %v", tr.done)
			}
			want := slices.Clone(names[:failAt+1])
			slices.Reverse(want)
			if d := cmp.Diff(want, tr.undone); d != "" {
				t.Errorf("undo order (-want +got):\n%s", d)
			}
		})
	}
}

func TestFailureCancelsTheOtherStepsOfTheStageAndNamesTheCause(t *testing.T) {
	tr := &trace{done: map[string]bool{}}
	boom := errors.New("boom")
	stages := []Stage{{
		tr.step("slow", func(ctx context.Context) error {
			<-ctx.Done()
			return ctx.Err()
		}),
		tr.step("broken", func(context.Context) error { return boom }),
	}}
	_, err := runner().Run(t.Context(), time.Now(), stages)
	if !errors.Is(err, boom) || err.Error() != "broken: boom" {
		t.Fatalf("err = %v; want broken: boom", err)
	}
	if len(tr.done) != 0 {
		t.Errorf("left behind: %v", tr.done)
	}
}

func TestUnwindOutlivesACancelledCallerAndGoesOnAfterAFailure(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	tr := &trace{done: map[string]bool{}}
	stuck := errors.New("busy")
	stages := []Stage{
		{tr.step("first", nil)},
		{{Name: "second", Do: func(context.Context) error { return nil }, Undo: func(context.Context) error { return stuck }}},
		{tr.step("third", func(ctx context.Context) error {
			cancel()
			<-ctx.Done()
			return context.Cause(ctx)
		})},
	}
	res, err := runner().Run(ctx, time.Now(), stages)
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("err = %v; want canceled", err)
	}
	if !errors.Is(res.UndoErr, stuck) {
		t.Errorf("undo err = %v; want busy", res.UndoErr)
	}
	if len(tr.done) != 0 {
		t.Errorf("left behind: %v", tr.done)
	}
}

func TestCancelledBeforeTheStartDoesNothing(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := fmt.Errorf("deleted")
	cancel(cause)
	tr := &trace{done: map[string]bool{}}
	_, err := runner().Run(ctx, time.Now(), []Stage{{tr.step("a", nil)}})
	if !errors.Is(err, cause) {
		t.Fatalf("err = %v; want the cancel's cause", err)
	}
	if len(tr.done) != 0 {
		t.Errorf("did something: %v", tr.done)
	}
}
