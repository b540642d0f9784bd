package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/hosttest"
	"github.com/cubesandbox/cubelet/internal/sandbox"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// memRecords is a journal that survives a manager, not the process.
type memRecords struct {
	mu      sync.Mutex
	records map[string]sandbox.Record
	keys    map[string]sandbox.Key
	fail    map[string]error // by operation: create, put, delete
}

func newRecords() *memRecords {
	return &memRecords{records: map[string]sandbox.Record{}, keys: map[string]sandbox.Key{}, fail: map[string]error{}}
}

func (m *memRecords) Load(context.Context) (map[string]sandbox.Record, map[string]sandbox.Key, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.records), maps.Clone(m.keys), nil
}

func (m *memRecords) Create(_ context.Context, r sandbox.Record, key string, k sandbox.Key) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.fail["create"]; err != nil {
		return err
	}
	m.records[r.ID] = r
	if key != "" {
		m.keys[key] = k
	}
	return nil
}

func (m *memRecords) Put(_ context.Context, r sandbox.Record) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.fail["put"]; err != nil {
		return err
	}
	m.records[r.ID] = r
	return nil
}

func (m *memRecords) Delete(_ context.Context, id, key string, k sandbox.Key) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.fail["delete"]; err != nil {
		return err
	}
	delete(m.records, id)
	delete(m.keys, key)
	if key != "" && k.SandboxID != "" {
		m.keys[key] = k
	}
	return nil
}

func (m *memRecords) DropKeys(_ context.Context, keys []string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, k := range keys {
		delete(m.keys, k)
	}
	return nil
}

func newManager(w *hosttest.World, rec *memRecords) *sandbox.Manager {
	return sandbox.New(sandbox.Config{
		VMMs: hosttest.VMMs{W: w}, Network: hosttest.Network{W: w}, Disks: hosttest.Disks{W: w},
		Templates: hosttest.Templates{W: w}, Snapshots: hosttest.Snapshots{W: w}, Guest: hosttest.Guest{W: w}, Records: rec,
		Node: sandbox.NodeFacts{
			SandboxesDir: "/pool",
			Nameservers:  []string{"192.0.2.53"},
			Limits:       func(r cube.Resources) vmm.Limits { return vmm.Limits{MemoryBytes: int64(r.MemoryMiB) << 20} },
		},
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Now: time.Now,
		MaxSandboxes: 100, UndoTimeout: time.Minute, VerbTimeout: time.Minute, RetryDelete: time.Minute, KeepKeys: time.Hour,
	})
}

func start(t *testing.T) (*sandbox.Manager, *hosttest.World, *memRecords) {
	t.Helper()
	w, rec := hosttest.NewWorld(), newRecords()
	m := newManager(w, rec)
	t.Cleanup(m.Close)
	return m, w, rec
}

func wantEmpty(t *testing.T, w *hosttest.World, rec *memRecords) {
	t.Helper()
	if left := w.String(); left != "" {
		t.Errorf("left on the host:\n%s", left)
	}
	rec.mu.Lock()
	defer rec.mu.Unlock()
	if len(rec.records) != 0 {
		t.Errorf("left in the journal: %v", rec.records)
	}
}

func wantCode(t *testing.T, err error, code cube.Code) {
	t.Helper()
	if err == nil || cube.CodeOf(err) != code {
		t.Fatalf("err = %v; want code %v", err, code)
	}
}

func base() cube.SandboxSpec { return cube.SandboxSpec{TemplateRef: "base"} }

func TestCreateRunsAndDeleteLeavesNothing(t *testing.T) {
	m, w, rec := start(t)
	spec := base()
	spec.Env = map[string]string{"A": "1"}
	spec.Metadata = map[string]string{"owner": "x"}
	sb, err := m.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	if sb.Phase != cube.PhaseRunning || sb.TemplateID != "tpl-base" || sb.PID == 0 || sb.GuestAddress != "169.254.0.22/30" {
		t.Errorf("sandbox = %+v", sb)
	}
	var stages []string
	for _, tm := range sb.Timings {
		stages = append(stages, tm.Stage)
	}
	if got := strings.Join(stages, " "); got != "template journal vmm-slot network disk restore agent commit" {
		t.Errorf("stages = %s", got)
	}
	in := w.Told(sb.ID)
	if in.Hostname != sb.ID || len(in.MachineID) != 32 || len(in.AccessToken) != 64 || len(in.Entropy) < 32 || in.Env["A"] != "1" || in.Time.IsZero() {
		t.Errorf("the guest was told %+v", in)
	}
	if rec.records[sb.ID].Phase != cube.PhaseRunning {
		t.Errorf("journal says %v", rec.records[sb.ID].Phase)
	}
	if err := m.Delete(t.Context(), sb.ID[:6]); err != nil {
		t.Fatal(err)
	}
	wantEmpty(t, w, rec)
	wantCode(t, m.Delete(t.Context(), sb.ID), cube.CodeNotFound)
}

func TestTwoSandboxesShareNoIdentity(t *testing.T) {
	m, w, _ := start(t)
	a, err := m.Create(t.Context(), base())
	if err != nil {
		t.Fatal(err)
	}
	b, err := m.Create(t.Context(), base())
	if err != nil {
		t.Fatal(err)
	}
	x, y := w.Told(a.ID), w.Told(b.ID)
	if x.MachineID == y.MachineID || x.AccessToken == y.AccessToken || x.Hostname == y.Hostname || string(x.Entropy) == string(y.Entropy) {
		t.Errorf("shared identity: %+v and %+v", x, y)
	}
}

// facts: "One failed boot holds the tap (EBUSY) and the name for ever".
func TestAFailureAtAnyStepLeavesNothing(t *testing.T) {
	boom := cube.Errorf(cube.CodeNoSpace, "boom")
	for _, op := range hosttest.Ops() {
		for _, after := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/after=%v", op, after), func(t *testing.T) {
				m, w, rec := start(t)
				w.Break(op, hosttest.Fault{Err: boom, AfterEffect: after})
				_, err := m.Create(t.Context(), base())
				wantCode(t, err, cube.CodeNoSpace)
				wantEmpty(t, w, rec)
				w.Break(op, hosttest.Fault{})
				if _, err := m.Create(t.Context(), base()); err != nil {
					t.Errorf("create after the fault is mended: %v", err)
				}
			})
		}
	}
}

func TestAJournalThatCannotBeWrittenLeavesNothing(t *testing.T) {
	for _, op := range []string{"create", "put"} {
		t.Run(op, func(t *testing.T) {
			m, w, rec := start(t)
			rec.fail[op] = cube.Errorf(cube.CodeNoSpace, "disk full")
			_, err := m.Create(t.Context(), base())
			wantCode(t, err, cube.CodeNoSpace)
			wantEmpty(t, w, rec)
		})
	}
}

func TestACallerThatLeavesAtAnyStepLeavesNothing(t *testing.T) {
	for _, op := range hosttest.Ops() {
		t.Run(op, func(t *testing.T) {
			m, w, rec := start(t)
			reached := make(chan struct{})
			w.Break(op, hosttest.Fault{Block: true, Reached: reached})
			ctx, cancel := context.WithCancel(t.Context())
			go func() { <-reached; cancel() }()
			_, err := m.Create(ctx, base())
			wantCode(t, err, cube.CodeCanceled)
			wantEmpty(t, w, rec)
		})
	}
}

func TestTheCallersDeadlineIsHonoured(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, w, rec := start(t)
		w.Break("launch", hosttest.Fault{Block: true})
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		_, err := m.Create(ctx, base())
		wantCode(t, err, cube.CodeDeadlineExceeded)
		wantEmpty(t, w, rec)
		m.Close()
	})
}

// facts: "Delete during create".
func TestDeleteDuringCreateWins(t *testing.T) {
	for _, op := range []string{"claim-vmm", "claim-network", "clone", "launch", "init"} {
		t.Run(op, func(t *testing.T) {
			m, w, rec := start(t)
			reached := make(chan struct{})
			w.Break(op, hosttest.Fault{Block: true, Reached: reached})
			result := make(chan error, 1)
			go func() {
				_, err := m.Create(t.Context(), base())
				result <- err
			}()
			<-reached
			page, err := m.List(t.Context(), cube.ListFilter{})
			if err != nil || len(page.Sandboxes) != 1 || page.Sandboxes[0].Phase != cube.PhaseCreating {
				t.Fatalf("list during create = %+v, %v", page, err)
			}
			if err := m.Delete(t.Context(), page.Sandboxes[0].ID); err != nil {
				t.Fatal(err)
			}
			wantCode(t, <-result, cube.CodeAborted)
			wantEmpty(t, w, rec)
		})
	}
}

// facts: "Create retried with the same ID or key makes two."
func TestTheSameKeyJoinsOrReturnsTheFirstResult(t *testing.T) {
	m, w, rec := start(t)
	spec := base()
	spec.IdempotencyKey = "k1"
	var wg sync.WaitGroup
	ids := make([]string, 10)
	for i := range ids {
		wg.Go(func() {
			sb, err := m.Create(t.Context(), spec)
			if err != nil {
				t.Errorf("create %d: %v", i, err)
			}
			ids[i] = sb.ID
		})
	}
	wg.Wait()
	for _, id := range ids {
		if id != ids[0] || id == "" {
			t.Fatalf("ids = %v; want one", ids)
		}
	}
	other := spec
	other.Env = map[string]string{"X": "1"}
	_, err := m.Create(t.Context(), other)
	wantCode(t, err, cube.CodeAlreadyExists)

	// A restarted daemon still knows the key.
	m.Close()
	m2 := newManager(w, rec)
	defer m2.Close()
	if _, err := m2.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	sb, err := m2.Create(t.Context(), spec)
	if err != nil || sb.ID != ids[0] {
		t.Fatalf("after restart: %v, %v; want %s", sb.ID, err, ids[0])
	}
	// A late retry does not bring a deleted sandbox back.
	if err := m2.Delete(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	_, err = m2.Create(t.Context(), spec)
	wantCode(t, err, cube.CodeFailedPrecondition)
	wantEmpty(t, w, rec)
}

func TestAFailedCreateFreesItsKey(t *testing.T) {
	m, w, _ := start(t)
	spec := base()
	spec.IdempotencyKey = "k1"
	w.Break("launch", hosttest.Fault{Err: errors.New("boom")})
	if _, err := m.Create(t.Context(), spec); err == nil {
		t.Fatal("create succeeded")
	}
	w.Break("launch", hosttest.Fault{})
	if _, err := m.Create(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
}

func TestKeysOfDeletedSandboxesArePruned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _, rec := start(t)
		spec := base()
		spec.IdempotencyKey = "k1"
		sb, err := m.Create(t.Context(), spec)
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Delete(t.Context(), sb.ID); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * time.Hour) // the bubble's clock
		if err := m.PruneKeys(t.Context()); err != nil || len(rec.keys) != 0 {
			t.Fatalf("keys = %v, err = %v", rec.keys, err)
		}
		if _, err := m.Create(t.Context(), spec); err != nil {
			t.Fatal(err)
		}
		m.Close()
	})
}

func TestTheTimeToLiveEndsTheSandbox(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, w, rec := start(t)
		spec := base()
		spec.Timeout = time.Minute
		sb, err := m.Create(t.Context(), spec)
		if err != nil {
			t.Fatal(err)
		}
		if got := time.Until(sb.ExpiresAt); got != time.Minute {
			t.Errorf("expires in %v", got)
		}
		time.Sleep(59 * time.Second)
		synctest.Wait()
		if _, err := m.Get(t.Context(), sb.ID); err != nil {
			t.Fatalf("gone too early: %v", err)
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		wantEmpty(t, w, rec)
		m.Close()
	})
}

func TestAnExpiredSandboxThatCannotBeDeletedIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, w, rec := start(t)
		spec := base()
		spec.Timeout = time.Minute
		if _, err := m.Create(t.Context(), spec); err != nil {
			t.Fatal(err)
		}
		w.Break("remove-disk", hosttest.Fault{Err: errors.New("busy")})
		time.Sleep(61 * time.Second)
		synctest.Wait()
		w.Break("remove-disk", hosttest.Fault{})
		time.Sleep(61 * time.Second)
		synctest.Wait()
		wantEmpty(t, w, rec)
		m.Close()
	})
}

func TestAVMMThatDiesFailsItsSandboxWhichCanBeDeleted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, w, rec := start(t)
		sb, err := m.Create(t.Context(), base())
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		w.Kill(sb.ID, 139)
		synctest.Wait()
		got, err := m.Get(t.Context(), sb.ID)
		if err != nil || got.Phase != cube.PhaseFailed || !strings.Contains(got.Reason, "139") {
			t.Fatalf("sandbox = %+v, %v", got, err)
		}
		_, err = m.Exec(t.Context(), sb.ID, cube.ExecSpec{})
		wantCode(t, err, cube.CodeFailedPrecondition)
		if err := m.Delete(t.Context(), sb.ID); err != nil {
			t.Fatal(err)
		}
		wantEmpty(t, w, rec)
		m.Close()
	})
}

func TestADeleteThatLeavesSomethingSaysSoAndCanBeRepeated(t *testing.T) {
	m, w, rec := start(t)
	sb, err := m.Create(t.Context(), base())
	if err != nil {
		t.Fatal(err)
	}
	w.Break("remove-disk", hosttest.Fault{Err: errors.New("busy")})
	if err := m.Delete(t.Context(), sb.ID); err == nil || !strings.Contains(err.Error(), "busy") {
		t.Fatalf("err = %v", err)
	}
	got, err := m.Get(t.Context(), sb.ID)
	if err != nil || got.Phase != cube.PhaseFailed {
		t.Fatalf("sandbox = %+v, %v", got, err)
	}
	w.Break("remove-disk", hosttest.Fault{})
	if err := m.Delete(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	wantEmpty(t, w, rec)
}

// facts: "Double delete."
func TestConcurrentDeletesAllSucceed(t *testing.T) {
	m, w, rec := start(t)
	sb, err := m.Create(t.Context(), base())
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if err := m.Delete(t.Context(), sb.ID); err != nil && !cube.IsNotFound(err) {
				t.Errorf("delete: %v", err)
			}
		})
	}
	wg.Wait()
	wantEmpty(t, w, rec)
}

func TestRestartAdoptsTheRunningAndUnwindsTheUnfinished(t *testing.T) {
	w, rec := hosttest.NewWorld(), newRecords()
	m := newManager(w, rec)
	spec := base()
	spec.Timeout = time.Hour
	run, err := m.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	dead, err := m.Create(t.Context(), base())
	if err != nil {
		t.Fatal(err)
	}
	m.Close()
	w.Kill(dead.ID, 1)
	// What a kill -9 leaves of a create and of a delete.
	half := rec.records[dead.ID]
	for id, phase := range map[string]cube.Phase{"s-half": cube.PhaseCreating, "s-dying": cube.PhaseDeleting} {
		r := half
		r.ID, r.Phase = id, phase
		rec.records[id] = r
		if _, err := (hosttest.Disks{W: w}).Create(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := (hosttest.Disks{W: w}).Create(t.Context(), "s-stray"); err != nil {
		t.Fatal(err)
	}
	for range 2 { // recovery may itself be cut off and repeated
		m2 := newManager(w, rec)
		if _, err := m2.Recover(t.Context()); err != nil {
			t.Fatal(err)
		}
		page, err := m2.List(t.Context(), cube.ListFilter{})
		if err != nil || len(page.Sandboxes) != 2 {
			t.Fatalf("after recovery: %+v, %v", page, err)
		}
		if got, err := m2.Get(t.Context(), run.ID); err != nil || got.Phase != cube.PhaseRunning || !got.ExpiresAt.Equal(run.ExpiresAt) {
			t.Errorf("running one = %+v, %v", got, err)
		}
		if got, err := m2.Get(t.Context(), dead.ID); err != nil || got.Phase != cube.PhaseFailed {
			t.Errorf("dead one = %+v, %v", got, err)
		}
		m2.Close()
	}
	m3 := newManager(w, rec)
	defer m3.Close()
	if _, err := m3.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{run.ID, dead.ID} {
		if err := m3.Delete(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	wantEmpty(t, w, rec)
}

func TestListPagesFiltersAndOrders(t *testing.T) {
	m, _, _ := start(t)
	var ids []string
	for i := range 7 {
		spec := base()
		spec.Metadata = map[string]string{"odd": fmt.Sprint(i % 2), "n": fmt.Sprint(i)}
		sb, err := m.Create(t.Context(), spec)
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, sb.ID)
	}
	var got []string
	f := cube.ListFilter{PageSize: 3}
	for {
		page, err := m.List(t.Context(), f)
		if err != nil {
			t.Fatal(err)
		}
		if page.Total != 7 {
			t.Errorf("total = %d", page.Total)
		}
		for _, sb := range page.Sandboxes {
			got = append(got, sb.ID)
		}
		if f.PageToken = page.NextPageToken; f.PageToken == "" {
			break
		}
	}
	if strings.Join(got, " ") != strings.Join(ids, " ") {
		t.Errorf("pages gave %v; want %v", got, ids)
	}
	page, err := m.List(t.Context(), cube.ListFilter{Metadata: map[string]string{"odd": "1"}, Phases: []cube.Phase{cube.PhaseRunning}, TemplateRef: "base"})
	if err != nil || page.Total != 3 {
		t.Errorf("odd ones: %+v, %v", page, err)
	}
	page, err = m.List(t.Context(), cube.ListFilter{Phases: []cube.Phase{cube.PhaseFailed}})
	if err != nil || page.Total != 0 {
		t.Errorf("failed ones: %+v, %v", page, err)
	}
	_, err = m.List(t.Context(), cube.ListFilter{PageToken: "nonsense!"})
	wantCode(t, err, cube.CodeInvalid)
}

func TestBadRequestsAreRefusedBeforeAnyEffect(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*cube.SandboxSpec)
		code   cube.Code
		field  string
	}{
		"no template":      {func(s *cube.SandboxSpec) { s.TemplateRef = "" }, cube.CodeInvalid, "template_id"},
		"unknown template": {func(s *cube.SandboxSpec) { s.TemplateRef = "tpl-12345" }, cube.CodeNotFound, ""},
		"negative timeout": {func(s *cube.SandboxSpec) { s.Timeout = -1 }, cube.CodeInvalid, "timeout"},
		"negative memory":  {func(s *cube.SandboxSpec) { s.Resources.MemoryMiB = -1 }, cube.CodeInvalid, "resources.memory_mib"},
		"env name":         {func(s *cube.SandboxSpec) { s.Env = map[string]string{"A=B": "x"} }, cube.CodeInvalid, "env"},
		"cidr":             {func(s *cube.SandboxSpec) { s.Network.CIDR = "192.168.10.1/24" }, cube.CodeInvalid, "network.cidr"},
		"long key":         {func(s *cube.SandboxSpec) { s.IdempotencyKey = strings.Repeat("k", 129) }, cube.CodeInvalid, "idempotency_key"},
		"host mount": {func(s *cube.SandboxSpec) {
			s.HostMounts = []cube.HostMount{{HostPath: "/data/models", ContainerPath: "/mnt/models"}}
		}, cube.CodeUnimplemented, "metadata.host-mount"},
		"host mount path": {func(s *cube.SandboxSpec) {
			s.HostMounts = []cube.HostMount{{HostPath: "/data/../etc", ContainerPath: "/mnt"}}
		}, cube.CodeInvalid, "metadata.host-mount[0].hostPath"},
	} {
		t.Run(name, func(t *testing.T) {
			m, w, rec := start(t)
			spec := base()
			c.change(&spec)
			_, err := m.Create(t.Context(), spec)
			wantCode(t, err, c.code)
			var e *cube.Error
			if c.field != "" && (!errors.As(err, &e) || e.Field != c.field) {
				t.Errorf("err = %v; want field %s", err, c.field)
			}
			wantEmpty(t, w, rec)
		})
	}
}

func TestTheNodesLimitRefusesWithAHint(t *testing.T) {
	m, _, _ := start(t)
	for range 100 {
		if _, err := m.Create(t.Context(), base()); err != nil {
			t.Fatal(err)
		}
	}
	_, err := m.Create(t.Context(), base())
	wantCode(t, err, cube.CodeResourceExhausted)
}
