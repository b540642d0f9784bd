package template_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/hosttest"
	"github.com/cubesandbox/cubelet/internal/template"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

func TestATemplateIsCompleteWhenCreateReturns(t *testing.T) {
	h := newHost(t)
	m := h.manager()
	var stages []string
	spec := small()
	spec.Name, spec.StartCommand, spec.Env = "app", "serve &", map[string]string{"FROM": "template"}
	tpl, err := m.Create(context.Background(), spec, func(p cube.TemplateProgress) {
		if len(stages) == 0 || stages[len(stages)-1] != p.Stage {
			stages = append(stages, p.Stage)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if want := "pull unpack root-disk boot start memory-image done"; strings.Join(stages, " ") != want {
		t.Errorf("stages %v, want %s", stages, want)
	}
	if tpl.State != cube.TemplateReady || tpl.Digest != "sha256:abc" || tpl.Config.User != "app" || !slices.Equal(tpl.Names, []string{"app"}) {
		t.Errorf("got %+v", tpl)
	}
	for _, name := range []string{"root.erofs", "base.layer", "manifest.json", "sizes/1x128/memory", "sizes/1x128/state", "sizes/1x128/layer", "sizes/1x128/manifest.json"} {
		info, err := os.Stat(filepath.Join(h.dir, tpl.ID, name))
		if err != nil || info.Mode().Perm() != 0o444 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
	if left := h.String(); left != "" {
		t.Errorf("left on the host:\n%s", left)
	}
	in := h.inits[0]
	if in.AccessToken != "" || in.User != "app" || in.Workdir != "/srv" || in.Env["FROM"] != "template" || in.Env["PATH"] != "/bin" || len(in.Entropy) < 32 {
		t.Errorf("the guest was told %+v", in)
	}
	machine := h.machines[tpl.ID+"-1x128"]
	if machine.Boot == nil || len(machine.Disks) != 2 || !machine.Disks[0].ReadOnly || machine.Disks[1].ReadOnly {
		t.Errorf("booted %+v", machine)
	}
}

func TestEveryReferenceFindsTheTemplate(t *testing.T) {
	m := newHost(t).manager()
	a := create(t, m, named("app"), func(s *cube.TemplateSpec) { s.ID = "tpl-aaaaa1" })
	b := create(t, m, func(s *cube.TemplateSpec) { s.ID = "tpl-aaaaa2" })
	for ref, want := range map[string]string{"app": a.ID, "tpl-aaaaa1": a.ID, "tpl-aaaaa2": b.ID} {
		if got, err := m.Get(context.Background(), ref); err != nil || got.ID != want {
			t.Errorf("%s: %s, %v", ref, got.ID, err)
		}
	}
	for ref, code := range map[string]cube.Code{"tpl-aaaaa": cube.CodeInvalid, "tpl-": cube.CodeNotFound, "": cube.CodeNotFound, "ap": cube.CodeNotFound, "tpl-b": cube.CodeNotFound} {
		_, err := m.Resolve(context.Background(), ref)
		wantCode(t, err, code)
	}
	all, err := m.List(context.Background())
	if err != nil || len(all) != 2 || all[0].ID != a.ID {
		t.Errorf("list: %v, %v", all, err)
	}
}

// operations of a build that can fail, in its order.
func operations() []string {
	return []string{"image", "clone-layer", "claim-vmm", "claim-network", "launch", "init-guest", "exec", "run", "save", "commit"}
}

func (h *host) breakAny(op string, err error, block bool, reached chan struct{}) {
	if slices.Contains(hosttest.Ops(), op) {
		h.Break(op, hosttest.Fault{Err: err, Block: block, Reached: reached})
		return
	}
	h.breakOp(op, fault{err: err, block: block, reached: reached})
}

func full() cube.TemplateSpec {
	s := small()
	s.Name, s.IdempotencyKey, s.StartCommand, s.Ready.Command = "app", "key", "serve", "probe"
	return s
}

func TestAFailureAtAnyStepLeavesNothingAndNamesItsCause(t *testing.T) {
	for _, op := range operations() {
		t.Run(op, func(t *testing.T) {
			h := newHost(t)
			m := h.manager()
			spec := full()
			spec.Ready.Timeout = 300 * time.Millisecond
			h.breakAny(op, cube.Errorf(cube.CodeNoSpace, "broken %s", op), false, nil)
			_, err := m.Create(context.Background(), spec, nil)
			code := cube.CodeNoSpace
			if op == "run" { // a probe that fails is tried again
				code = cube.CodeDeadlineExceeded
			}
			wantCode(t, err, code)
			if err == nil || !strings.Contains(err.Error(), "broken "+op) {
				t.Errorf("%v does not name the cause", err)
			}
			if booted := slices.Index(operations(), op) > 4 && op != "commit"; booted && !strings.Contains(err.Error(), "last words") {
				t.Errorf("%v does not show the console", err)
			}
			h.empty()
			h.mend()
			if _, err := m.Create(context.Background(), full(), nil); err != nil {
				t.Errorf("the next build: %v", err)
			}
		})
	}
}

func TestAnEffectWithAnErrorIsUndone(t *testing.T) {
	for _, op := range []string{"claim-vmm", "claim-network", "launch"} {
		t.Run(op, func(t *testing.T) {
			h := newHost(t)
			h.Break(op, hosttest.Fault{Err: errors.New("broken"), AfterEffect: true})
			_, err := h.manager().Create(context.Background(), full(), nil)
			wantCode(t, err, cube.CodeInternal)
			h.empty()
		})
	}
}

func TestACallerThatGoesAwayAtAnyStepLeavesNothing(t *testing.T) {
	for _, op := range operations() {
		if op == "commit" { // too late: it is done in spite of the caller
			continue
		}
		t.Run(op, func(t *testing.T) {
			h := newHost(t)
			m := h.manager()
			reached := make(chan struct{})
			h.breakAny(op, nil, true, reached)
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			go func() {
				<-reached
				cancel()
			}()
			_, err := m.Create(ctx, full(), nil)
			wantCode(t, err, cube.CodeCanceled)
			h.empty()
		})
	}
}

func TestACommitThatOnlySeemedToFailCounts(t *testing.T) {
	h := newHost(t)
	h.breakOp("after-commit", fault{err: errors.New("the answer was lost")})
	m := h.manager()
	tpl := create(t, m, named("app"))
	if id, err := m.Resolve(context.Background(), "app"); err != nil || id != tpl.ID {
		t.Errorf("%s, %v", id, err)
	}
}

func TestAMachineThatDiesEndsTheBuildAtOnce(t *testing.T) {
	h := newHost(t)
	m := h.manager()
	reached := make(chan struct{})
	h.breakOp("init-guest", fault{block: true, reached: reached})
	spec := full()
	spec.ID = "tpl-doomed"
	go func() {
		<-reached
		h.Kill("tpl-doomed-1x128", 139)
	}()
	_, err := m.Create(context.Background(), spec, nil)
	if err == nil || !strings.Contains(err.Error(), "code 139") || !strings.Contains(err.Error(), "booting\n?[1mlast words") {
		t.Errorf("got %v", err)
	}
	h.empty()
}

func TestAGuestThatNeverAnswersRunsIntoTheBootTimeout(t *testing.T) {
	h := newHost(t)
	h.breakOp("init-guest", fault{block: true})
	m := h.manager(func(c *template.Config) { c.BootTimeout = 50 * time.Millisecond })
	_, err := m.Create(context.Background(), full(), nil)
	wantCode(t, err, cube.CodeDeadlineExceeded)
	h.empty()
}

func TestAStartCommandThatFailsFailsTheBuild(t *testing.T) {
	h := newHost(t)
	h.ready = func() int { return 1 }
	h.commands = newSession(
		cube.ExecEvent{PID: 7},
		cube.ExecEvent{Stream: cube.StreamStderr, Data: []byte("serve: no such file\n")},
		cube.ExecEvent{Exit: &cube.ExecExit{Code: 127, Status: "exit status 127"}},
	)
	_, err := h.manager().Create(context.Background(), full(), nil)
	wantCode(t, err, cube.CodeFailedPrecondition)
	if !strings.Contains(err.Error(), "exit status 127") || !strings.Contains(err.Error(), "serve: no such file") {
		t.Errorf("got %v", err)
	}
	h.empty()
}

func TestAStartCommandThatEndsWellMayBecomeReadyLater(t *testing.T) {
	h := newHost(t)
	calls := 0
	h.ready = func() int { calls++; return max(0, 3-calls) }
	h.commands = newSession(cube.ExecEvent{PID: 7}, cube.ExecEvent{Exit: &cube.ExecExit{}})
	if _, err := h.manager().Create(context.Background(), full(), nil); err != nil {
		t.Error(err)
	}
	if calls != 3 {
		t.Errorf("probed %d times", calls)
	}
}

func TestReadinessByPort(t *testing.T) {
	h := newHost(t)
	m := h.manager()
	spec := small()
	spec.StartCommand, spec.Ready = "serve", cube.ReadySpec{Port: 8080, Timeout: 400 * time.Millisecond}
	_, err := m.Create(context.Background(), spec, nil)
	wantCode(t, err, cube.CodeDeadlineExceeded)
	if err == nil || !strings.Contains(err.Error(), "port 8080: connection refused") {
		t.Errorf("got %v", err)
	}
	h.empty()
	h.open[8080] = true
	h.commands = nil
	if _, err := m.Create(context.Background(), spec, nil); err != nil {
		t.Error(err)
	}
}

func TestAnImageWithoutShellOrSyncCanBeATemplate(t *testing.T) {
	h := newHost(t)
	h.breakOp("sync", fault{err: cube.Errorf(cube.CodeInvalid, "no such program")})
	create(t, h.manager())
}

func TestCallersWithOneKeyShareOneBuild(t *testing.T) {
	h := newHost(t)
	m := h.manager()
	var wg sync.WaitGroup
	ids := make([]string, 8)
	for i := range ids {
		wg.Go(func() {
			tpl, err := m.Create(context.Background(), full(), nil)
			if err != nil {
				t.Error(err)
			}
			ids[i] = tpl.ID
		})
	}
	wg.Wait()
	if ids = slices.Compact(ids); len(ids) != 1 || h.count("image") != 1 {
		t.Errorf("%v, %d builds", ids, h.count("image"))
	}
	again, err := h.manager().Create(context.Background(), full(), nil) // as after a restart
	if err != nil || again.ID != ids[0] {
		t.Errorf("after a restart: %s, %v", again.ID, err)
	}
	other := full()
	other.Env = map[string]string{"A": "b"}
	_, err = m.Create(context.Background(), other, nil)
	wantCode(t, err, cube.CodeAlreadyExists)
}

func TestABuildGoesOnWhileOneCallerWaits(t *testing.T) {
	h := newHost(t)
	m := h.manager()
	reached := make(chan struct{})
	h.breakOp("init-guest", fault{block: true, reached: reached})
	first, cancelFirst := context.WithCancel(context.Background())
	second, cancelSecond := context.WithCancel(context.Background())
	defer cancelSecond()
	results := make(chan error, 2)
	go func() { _, err := m.Create(first, full(), nil); results <- err }()
	await(t, reached)
	h.breakOp("init-guest", fault{block: true}) // not reached again
	joined := make(chan struct{})
	var once sync.Once
	go func() {
		_, err := m.Create(second, full(), func(cube.TemplateProgress) { once.Do(func() { close(joined) }) })
		results <- err
	}()
	await(t, joined)
	cancelFirst()
	wantCode(t, <-results, cube.CodeCanceled)
	if all, _ := m.List(context.Background()); len(all) != 1 || all[0].State != cube.TemplateBuilding {
		t.Errorf("the build is gone: %v", all)
	}
	cancelSecond()
	wantCode(t, <-results, cube.CodeCanceled)
	h.empty()
}

func TestANameMovesWhenTheNewBuildSucceeds(t *testing.T) {
	h := newHost(t)
	m := h.manager()
	old := create(t, m, named("app"))
	h.breakOp("save", fault{err: errors.New("broken")})
	spec := small()
	spec.Name = "app"
	if _, err := m.Create(context.Background(), spec, nil); err == nil {
		t.Fatal("the build succeeded")
	}
	if id, _ := m.Resolve(context.Background(), "app"); id != old.ID {
		t.Errorf("a failed build moved the name to %s", id)
	}
	h.mend()
	newer := create(t, m, named("app"))
	if id, _ := m.Resolve(context.Background(), "app"); id != newer.ID {
		t.Errorf("the name is of %s", id)
	}
	if got, _ := m.Get(context.Background(), old.ID); len(got.Names) != 0 {
		t.Errorf("the old template is still called %v", got.Names)
	}
}

func TestBadRequestsNameTheField(t *testing.T) {
	m := newHost(t).manager()
	for field, change := range map[string]func(*cube.TemplateSpec){
		"id":                   func(s *cube.TemplateSpec) { s.ID = "tpl-../../x" },
		"name":                 func(s *cube.TemplateSpec) { s.Name = "../x" },
		"image":                func(s *cube.TemplateSpec) { s.Image = "" },
		"archive_path":         func(s *cube.TemplateSpec) { s.Image, s.ArchivePath = "", "relative" },
		"disk_mib":             func(s *cube.TemplateSpec) { s.DiskMiB = 1 },
		"resources.vcpus":      func(s *cube.TemplateSpec) { s.Resources.VCPUs = 9 },
		"resources.memory_mib": func(s *cube.TemplateSpec) { s.Resources.MemoryMiB = 8192 },
		"ready.port":           func(s *cube.TemplateSpec) { s.Ready.Port = 70000 },
		"ready":                func(s *cube.TemplateSpec) { s.Ready = cube.ReadySpec{Port: 1, Command: "x"} },
		"ready.timeout":        func(s *cube.TemplateSpec) { s.Ready.Timeout = -1 },
		"env":                  func(s *cube.TemplateSpec) { s.Env = map[string]string{"A=B": ""} },
	} {
		spec := small()
		change(&spec)
		_, err := m.Create(context.Background(), spec, nil)
		var e *cube.Error
		if !errors.As(err, &e) || e.Code != cube.CodeInvalid || e.Field != field {
			t.Errorf("%s: got %v", field, err)
		}
	}
	spec := small()
	spec.Name = "tpl-abcdef"
	_, err := m.Create(context.Background(), spec, nil)
	wantCode(t, err, cube.CodeInvalid)
	spec = small()
	spec.ID = create(t, m).ID
	_, err = m.Create(context.Background(), spec, nil)
	wantCode(t, err, cube.CodeAlreadyExists)
}

func TestAMemoryImageThatDoesNotFitIsRefusedBeforeTheBoot(t *testing.T) {
	testenv.RequireRoot(t)
	h := newHost(t)
	if err := os.MkdirAll(h.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", h.dir, "tmpfs", 0, "size=160m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(h.dir, 0); err != nil {
			t.Error(err)
		}
	})
	_, err := h.manager().Create(context.Background(), full(), nil)
	wantCode(t, err, cube.CodeNoSpace)
	if h.count("init-guest") != 0 {
		t.Error("a machine was booted")
	}
	h.empty()
}

func TestCloseEndsBuilds(t *testing.T) {
	h := newHost(t)
	m := h.manager()
	reached := make(chan struct{})
	h.breakOp("save", fault{block: true, reached: reached})
	result := make(chan error)
	go func() { _, err := m.Create(context.Background(), full(), nil); result <- err }()
	await(t, reached)
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	wantCode(t, <-result, cube.CodeUnavailable)
	h.empty()
	_, err := m.Create(context.Background(), full(), nil)
	wantCode(t, err, cube.CodeUnavailable)
}
