package sandbox_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/hosttest"
	"github.com/cubesandbox/cubelet/internal/sandbox"
)

func mustCreate(t *testing.T, m *sandbox.Manager, spec cube.SandboxSpec) cube.Sandbox {
	t.Helper()
	sb, err := m.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

func wantHost(t *testing.T, w *hosttest.World, lines ...string) {
	t.Helper()
	if got, want := w.String(), strings.Join(lines, "\n"); got != want {
		t.Errorf("host:\n%s\nwant:\n%s", got, want)
	}
}

func wantPhase(t *testing.T, m *sandbox.Manager, id string, want cube.Phase) cube.Sandbox {
	t.Helper()
	sb, err := m.Get(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	if sb.Phase != want {
		t.Fatalf("%s is %s (%s); want %s", id, sb.Phase, sb.Reason, want)
	}
	return sb
}

func TestPauseFreesTheHostAndResumeGoesOnFromWhatItSaved(t *testing.T) {
	m, w, rec := start(t)
	spec := base()
	spec.Timeout = time.Hour
	id := mustCreate(t, m, spec).ID
	for generation := 1; generation <= 3; generation++ {
		for range 2 { // idempotent
			sb, err := m.Pause(t.Context(), id, cube.PauseFull)
			if err != nil {
				t.Fatal(err)
			}
			if sb.Phase != cube.PhasePaused || sb.Paused != cube.PauseFull || sb.PID != 0 || !sb.ExpiresAt.IsZero() {
				t.Errorf("paused: %+v", sb)
			}
		}
		layer, memory := "layer", ""
		if generation > 1 {
			layer, memory = fmt.Sprintf("layer.%d", generation-1), fmt.Sprintf("memory.%d ", generation-1)
		}
		state := strings.ReplaceAll(memory, "memory", "state")
		wantHost(t, w, fmt.Sprintf("disk %s [%s %smemory.%d root %sstate.%d]", id, layer, memory, generation, state, generation), "user "+id+" of tpl-base")
		for range 2 {
			sb, err := m.Resume(t.Context(), id, 0)
			if err != nil {
				t.Fatal(err)
			}
			if sb.Phase != cube.PhaseRunning || sb.Paused != "" || sb.PID == 0 || sb.ExpiresAt.IsZero() {
				t.Errorf("resumed: %+v", sb)
			}
		}
		owner := fmt.Sprintf("%s-g%d", id, generation)
		wantHost(t, w,
			fmt.Sprintf("disk %s [layer.%d memory.%d root state.%d]", id, generation, generation, generation),
			"network "+id+" ", "user "+id+" of tpl-base", "vmm "+owner+" launched=true")
		if got := w.Machine(owner); !strings.HasSuffix(got.MemoryPath, fmt.Sprintf("/memory.%d", generation)) || got.Boot != nil {
			t.Errorf("machine = %+v", got)
		}
	}
	if err := m.Delete(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	wantEmpty(t, w, rec)
}

func TestPauseThatKeepsMemoryOnlyStopsTheVCPUs(t *testing.T) {
	m, w, _ := start(t)
	id := mustCreate(t, m, base()).ID
	if _, err := m.Pause(t.Context(), id, cube.PauseKeepMemory); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(w.String(), "vmm "+id+" launched=true stopped") {
		t.Errorf("host:\n%s", w)
	}
	_, err := m.Pause(t.Context(), id, cube.PauseFull)
	wantCode(t, err, cube.CodeFailedPrecondition)
	if _, err := m.Resume(t.Context(), id, time.Hour); err != nil {
		t.Fatal(err)
	}
	if sb := wantPhase(t, m, id, cube.PhaseRunning); sb.ExpiresAt.IsZero() || strings.Contains(w.String(), "stopped") {
		t.Errorf("%+v\n%s", sb, w)
	}
	w.Kill(id, 3)
	for m.Phases()[cube.PhaseFailed] == 0 {
		time.Sleep(time.Millisecond)
	}
}

// Whatever goes wrong, the verb's error comes back, the sandbox is as it was before, and
// the verb works when it is tried again.
func TestAVerbThatFailsChangesNothing(t *testing.T) {
	broken := errors.New("broken")
	verbs := map[string]struct {
		ops     []string
		prepare func(*testing.T, *sandbox.Manager, string)
		do      func(*testing.T, *sandbox.Manager, string) error
	}{
		"pause": {
			ops: []string{"freeze", "sync"},
			do: func(t *testing.T, m *sandbox.Manager, id string) error {
				_, err := m.Pause(t.Context(), id, cube.PauseFull)
				return err
			},
		},
		"resume": {
			ops: []string{"claim-vmm", "claim-network", "clone", "launch", "init"},
			prepare: func(t *testing.T, m *sandbox.Manager, id string) {
				if _, err := m.Pause(t.Context(), id, cube.PauseFull); err != nil {
					t.Fatal(err)
				}
			},
			do: func(t *testing.T, m *sandbox.Manager, id string) error {
				_, err := m.Resume(t.Context(), id, 0)
				return err
			},
		},
		"snapshot": {
			ops: []string{"begin", "link", "flush", "freeze", "clone", "publish"},
			do: func(t *testing.T, m *sandbox.Manager, id string) error {
				_, err := m.Snapshot(t.Context(), id, cube.SnapshotSpec{ID: "snap-again"})
				return err
			},
		},
		"rollback": {
			ops: []string{"acquire-snapshot", "claim-vmm", "tap", "link", "clone", "pause-vmm", "launch", "init"},
			prepare: func(t *testing.T, m *sandbox.Manager, id string) {
				if _, err := m.Snapshot(t.Context(), id, cube.SnapshotSpec{ID: "snap-first"}); err != nil {
					t.Fatal(err)
				}
			},
			do: func(t *testing.T, m *sandbox.Manager, id string) error {
				_, err := m.Rollback(t.Context(), id, "snap-first")
				return err
			},
		},
	}
	for name, v := range verbs {
		for _, op := range v.ops {
			for _, after := range []bool{false, true} {
				if op == "begin" && after {
					continue // it undoes itself
				}
				t.Run(fmt.Sprintf("%s/%s/after=%v", name, op, after), func(t *testing.T) {
					m, w, rec := start(t)
					id := mustCreate(t, m, base()).ID
					if v.prepare != nil {
						v.prepare(t, m, id)
					}
					before, phase := w.String(), mustGet(t, m, id).Phase
					w.Break(op, hosttest.Fault{Err: broken, AfterEffect: after})
					if err := v.do(t, m, id); !errors.Is(err, broken) {
						t.Fatalf("err = %v; want %v", err, broken)
					}
					w.Break(op, hosttest.Fault{})
					wantHost(t, w, before)
					wantPhase(t, m, id, phase)
					if err := v.do(t, m, id); err != nil {
						t.Fatalf("again: %v", err)
					}
					if err := m.Delete(t.Context(), id); err != nil {
						t.Fatal(err)
					}
					for _, s := range []string{"snap-first", "snap-again"} {
						if err := (hosttest.Snapshots{W: w}).Delete(t.Context(), s, false); err != nil {
							t.Error(err)
						}
					}
					wantEmpty(t, w, rec)
				})
			}
		}
	}
}

func mustGet(t *testing.T, m *sandbox.Manager, id string) cube.Sandbox {
	t.Helper()
	sb, err := m.Get(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

func TestRollbackKeepsIdentityAndTimeToLive(t *testing.T) {
	m, w, _ := start(t)
	spec := base()
	spec.Timeout = time.Hour
	before := mustCreate(t, m, spec)
	token := w.Told(before.ID).AccessToken
	s, err := m.Snapshot(t.Context(), before.ID, cube.SnapshotSpec{})
	if err != nil {
		t.Fatal(err)
	}
	if s.SandboxID != before.ID || s.DirtyBytes == 0 || s.ParentID != "" {
		t.Errorf("snapshot = %+v", s)
	}
	after, err := m.Rollback(t.Context(), before.ID, s.ID)
	if err != nil {
		t.Fatal(err)
	}
	if after.SnapshotID != s.ID || !after.ExpiresAt.Equal(before.ExpiresAt) || after.PID == before.PID {
		t.Errorf("before %+v\nafter  %+v", before, after)
	}
	if got := w.Told(before.ID); got.AccessToken != token || got.PresentedToken != "" {
		t.Errorf("the guest was told %+v", got)
	}
	later, err := m.Snapshot(t.Context(), before.ID, cube.SnapshotSpec{})
	if err != nil || later.ParentID != s.ID {
		t.Errorf("snapshot after a rollback = %+v, %v", later, err)
	}
	other := mustCreate(t, m, base())
	_, err = m.Rollback(t.Context(), other.ID, s.ID)
	wantCode(t, err, cube.CodeFailedPrecondition)
}

func TestClonesHaveIdentitiesOfTheirOwn(t *testing.T) {
	m, w, _ := start(t)
	spec := base()
	spec.Metadata = map[string]string{"user": "ann"}
	spec.Env = map[string]string{"A": "1"}
	source := mustCreate(t, m, spec)
	told := w.Told(source.ID)
	results, err := m.Clone(t.Context(), cube.CloneSpec{SandboxRef: source.ID, Count: 5})
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{told.AccessToken: true, told.MachineID: true}
	for _, r := range results {
		if r.Err != nil {
			t.Fatal(r.Err)
		}
		in := w.Told(r.Sandbox.ID)
		if seen[in.AccessToken] || seen[in.MachineID] || in.PresentedToken != told.AccessToken || in.Address == "" || in.Env["A"] != "1" {
			t.Errorf("child was told %+v", in)
		}
		seen[in.AccessToken], seen[in.MachineID] = true, true
		if r.Sandbox.Metadata["user"] != "ann" || r.Sandbox.TemplateID != source.TemplateID {
			t.Errorf("child = %+v", r.Sandbox)
		}
	}
	if strings.Contains(w.String(), "snapshot ") {
		t.Errorf("the snapshot between is left:\n%s", w)
	}
	w.Break("launch", hosttest.Fault{Err: cube.Errorf(cube.CodeNoSpace, "full")})
	results, err = m.Clone(t.Context(), cube.CloneSpec{SandboxRef: source.ID, Count: 2})
	if err != nil || len(results) != 2 {
		t.Fatalf("%v, %v", results, err)
	}
	for _, r := range results {
		wantCode(t, r.Err, cube.CodeNoSpace)
	}
	for _, bad := range []cube.CloneSpec{{}, {SandboxRef: source.ID}, {SandboxRef: source.ID, SnapshotRef: "x", Count: 1}, {SandboxRef: source.ID, Count: 101}} {
		_, err := m.Clone(t.Context(), bad)
		wantCode(t, err, cube.CodeInvalid)
	}
}

// A daemon that stops at any moment of a verb finds the sandbox running or paused, whole.
func TestRestartInTheMiddleOfAVerb(t *testing.T) {
	verbs := map[string]struct {
		from cube.Phase
		op   string
		do   func(*testing.T, *sandbox.Manager, string)
	}{
		"pause, freezing":     {cube.PhaseRunning, "freeze", func(t *testing.T, m *sandbox.Manager, id string) { _, _ = m.Pause(t.Context(), id, cube.PauseFull) }},
		"pause, syncing":      {cube.PhaseRunning, "sync", func(t *testing.T, m *sandbox.Manager, id string) { _, _ = m.Pause(t.Context(), id, cube.PauseFull) }},
		"resume, launching":   {cube.PhasePaused, "launch", func(t *testing.T, m *sandbox.Manager, id string) { _, _ = m.Resume(t.Context(), id, 0) }},
		"resume, greeting":    {cube.PhasePaused, "init", func(t *testing.T, m *sandbox.Manager, id string) { _, _ = m.Resume(t.Context(), id, 0) }},
		"rollback, launching": {cube.PhaseRunning, "launch", func(t *testing.T, m *sandbox.Manager, id string) { _, _ = m.Rollback(t.Context(), id, "snap-first") }},
		"rollback, greeting":  {cube.PhaseRunning, "init", func(t *testing.T, m *sandbox.Manager, id string) { _, _ = m.Rollback(t.Context(), id, "snap-first") }},
	}
	for name, v := range verbs {
		t.Run(name, func(t *testing.T) {
			m, w, rec := start(t)
			id := mustCreate(t, m, base()).ID
			if _, err := m.Snapshot(t.Context(), id, cube.SnapshotSpec{ID: "snap-first"}); err != nil {
				t.Fatal(err)
			}
			if v.from == cube.PhasePaused {
				if _, err := m.Pause(t.Context(), id, cube.PauseFull); err != nil {
					t.Fatal(err)
				}
			}
			before := w.String()
			reached := make(chan struct{})
			w.Break(v.op, hosttest.Fault{Block: true, Reached: reached})
			go v.do(t, m, id)
			<-reached
			rec.mu.Lock()
			rec.fail["put"] = errors.New("the daemon is dead")
			rec.mu.Unlock()
			dead := w.Dead()
			m.Close()
			rec.mu.Lock()
			rec.fail = map[string]error{}
			rec.mu.Unlock()
			w.Break(v.op, hosttest.Fault{})

			next := newManager(dead, rec)
			t.Cleanup(next.Close)
			if _, err := next.Recover(t.Context()); err != nil {
				t.Fatal(err)
			}
			wantPhase(t, next, id, v.from)
			wantHost(t, dead, before)
			if err := next.Delete(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestTimeToLiveMayPauseInsteadOfDelete(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _, _ := start(t)
		spec := base()
		spec.Timeout, spec.OnTimeout = time.Minute, cube.OnTimeoutPause
		id := mustCreate(t, m, spec).ID
		time.Sleep(time.Minute + time.Second)
		synctest.Wait()
		wantPhase(t, m, id, cube.PhasePaused)
		time.Sleep(time.Hour)
		wantPhase(t, m, id, cube.PhasePaused)
		if _, err := m.Resume(t.Context(), id, 0); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute + time.Second)
		synctest.Wait()
		wantPhase(t, m, id, cube.PhasePaused)
		m.Close()
	})
}

func TestDeleteWinsOverAVerb(t *testing.T) {
	m, w, rec := start(t)
	id := mustCreate(t, m, base()).ID
	reached := make(chan struct{})
	w.Break("freeze", hosttest.Fault{Block: true, Reached: reached})
	paused := make(chan error, 1)
	go func() {
		_, err := m.Pause(t.Context(), id, cube.PauseFull)
		paused <- err
	}()
	<-reached
	if err := m.Delete(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	wantCode(t, <-paused, cube.CodeAborted)
	wantEmpty(t, w, rec)
}
