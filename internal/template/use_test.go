package template_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/template"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

func TestForceDeletesATemplateThatIsInUse(t *testing.T) {
	h := newHost(t)
	m := h.manager()
	tpl := create(t, m, named("app"))
	img, err := m.Acquire(context.Background(), "app", cube.Resources{}, "sb-one")
	if err != nil {
		t.Fatal(err)
	}
	memory, err := os.Open(img.MemoryPath) // as its sandbox has
	if err != nil {
		t.Fatal(err)
	}
	defer memory.Close()
	if err := m.Delete(context.Background(), "app", true); err != nil {
		t.Fatal(err)
	}
	wantCode(t, acquire(m, tpl.ID, cube.Resources{}, "sb-two"), cube.CodeNotFound)
	if _, err := memory.Stat(); err != nil {
		t.Errorf("the user's file: %v", err)
	}
	if n, err := memory.ReadAt(make([]byte, 1), 0); n != 1 {
		t.Errorf("the user cannot read on: %v", err)
	}
	m.Release(tpl.ID, "sb-one")
	h.empty()
}

func acquire(m *template.Manager, ref string, size cube.Resources, user string) error {
	img, err := m.Acquire(context.Background(), ref, size, user)
	if err != nil {
		return err
	}
	for _, path := range []string{img.RootPath, img.LayerPath, img.MemoryPath, img.StatePath} {
		if _, err := os.Stat(path); err != nil {
			return err
		}
	}
	if img.Resources.MemoryMiB == 0 || img.MAC == "" || img.Env["FROM"] == "" {
		return fmt.Errorf("incomplete image %+v", img)
	}
	return nil
}

func TestATemplateInUseCannotBeDeleted(t *testing.T) {
	h := newHost(t)
	m := h.manager()
	tpl := create(t, m, named("app"), func(s *cube.TemplateSpec) { s.IdempotencyKey = "key" })
	if err := acquire(m, "app", cube.Resources{}, "sb-one"); err != nil {
		t.Fatal(err)
	}
	m.Hold(tpl.ID, "sb-two")
	err := m.Delete(context.Background(), "app", false)
	wantCode(t, err, cube.CodeFailedPrecondition)
	if err == nil || !strings.Contains(err.Error(), "sb-one, sb-two") {
		t.Errorf("got %v", err)
	}
	m.Release(tpl.ID, "sb-one")
	m.Release(tpl.ID, "sb-two")
	m.Release(tpl.ID, "sb-two")
	if err := m.Delete(context.Background(), "app", false); err != nil {
		t.Fatal(err)
	}
	h.empty()
	wantCode(t, m.Delete(context.Background(), "app", false), cube.CodeNotFound)
	wantCode(t, acquire(m, tpl.ID, cube.Resources{}, "sb"), cube.CodeNotFound)
	m.Hold(tpl.ID, "sb-three") // of a template that is gone
}

func TestANewSizeIsBuiltOnceForAllWhoWait(t *testing.T) {
	h := newHost(t)
	m := h.manager()
	tpl := create(t, m)
	size := cube.Resources{VCPUs: 2, MemoryMiB: 256}
	var wg sync.WaitGroup
	for i := range 10 {
		wg.Go(func() {
			if err := acquire(m, tpl.ID, size, fmt.Sprint("sb-", i)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := h.count("save"); n != 2 {
		t.Errorf("%d memory images were made", n)
	}
	if got, _ := m.Get(context.Background(), tpl.ID); !slices.Equal(got.Sizes, []cube.Resources{{VCPUs: 1, MemoryMiB: 128}, size}) {
		t.Errorf("sizes %v", got.Sizes)
	}
	if err := acquire(h.manager(), tpl.ID, size, "after-restart"); err != nil || h.count("save") != 2 {
		t.Errorf("%v, %d memory images", err, h.count("save"))
	}
}

func TestAFailedSizeLeavesTheTemplateAsItWas(t *testing.T) {
	for _, op := range []string{"clone-layer", "claim-vmm", "claim-network", "launch", "init-guest", "save"} {
		t.Run(op, func(t *testing.T) {
			h := newHost(t)
			m := h.manager()
			tpl := create(t, m)
			h.breakAny(op, cube.Errorf(cube.CodeResourceExhausted, "broken %s", op), false, nil)
			wantCode(t, acquire(m, tpl.ID, cube.Resources{VCPUs: 2}, "sb"), cube.CodeResourceExhausted)
			if left := h.String(); left != "" {
				t.Errorf("left on the host:\n%s", left)
			}
			if entries, _ := os.ReadDir(filepath.Join(h.dir, tpl.ID, "sizes")); len(entries) != 1 {
				t.Errorf("sizes: %v", entries)
			}
			h.mend()
			if err := m.Delete(context.Background(), tpl.ID, false); err != nil {
				t.Errorf("the failed user holds it: %v", err)
			}
		})
	}
}

func TestASizeBuildEndsWithItsLastWaiter(t *testing.T) {
	h := newHost(t)
	m := h.manager()
	tpl := create(t, m)
	reached := make(chan struct{})
	h.breakOp("init-guest", fault{block: true, reached: reached})
	ctx, cancel := context.WithCancel(context.Background())
	result := make(chan error)
	go func() {
		_, err := m.Acquire(ctx, tpl.ID, cube.Resources{VCPUs: 2}, "sb")
		result <- err
	}()
	await(t, reached)
	wantCode(t, m.Delete(context.Background(), tpl.ID, false), cube.CodeFailedPrecondition)
	cancel()
	wantCode(t, <-result, cube.CodeCanceled)
	if left := h.String(); left != "" {
		t.Errorf("left on the host:\n%s", left)
	}
	h.mend()
	if err := acquire(m, tpl.ID, cube.Resources{VCPUs: 2}, "sb"); err != nil {
		t.Errorf("the next one: %v", err)
	}
}

func TestSizesOutOfBoundsAreRefused(t *testing.T) {
	m := newHost(t).manager()
	tpl := create(t, m)
	for _, size := range []cube.Resources{{VCPUs: -1}, {VCPUs: 9}, {MemoryMiB: 127}, {MemoryMiB: 5000}} {
		wantCode(t, acquire(m, tpl.ID, size, "sb"), cube.CodeInvalid)
	}
	if err := m.Delete(context.Background(), tpl.ID, false); err != nil {
		t.Error(err)
	}
}

func TestAnotherMachineMakesItsOwnMemoryImages(t *testing.T) {
	h := newHost(t)
	tpl := create(t, h.manager())
	upgraded := h.manager(func(c *template.Config) { c.Machine.QEMU = "11.0.0" })
	if err := acquire(upgraded, tpl.ID, cube.Resources{}, "sb"); err != nil {
		t.Fatal(err)
	}
	if n := h.count("save"); n != 2 {
		t.Errorf("%d memory images were made", n)
	}
	got, err := upgraded.Get(context.Background(), tpl.ID)
	if err != nil || got.Machine.QEMU != "11.0.0" || len(got.Sizes) != 1 {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestADamagedMemoryImageIsMadeAnew(t *testing.T) {
	for name, spoil := range map[string]func(dir string) error{
		"truncated memory": func(dir string) error { return os.Truncate(filepath.Join(dir, "memory"), 4096) },
		"missing state":    func(dir string) error { return os.Remove(filepath.Join(dir, "state")) },
		"broken manifest":  func(dir string) error { return os.Truncate(filepath.Join(dir, "manifest.json"), 10) },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			tpl := create(t, h.manager())
			if err := spoil(filepath.Join(h.dir, tpl.ID, "sizes", "1x128")); err != nil {
				t.Fatal(err)
			}
			if err := acquire(h.manager(), tpl.ID, cube.Resources{}, "sb"); err != nil || h.count("save") != 2 {
				t.Errorf("%v, %d memory images", err, h.count("save"))
			}
		})
	}
}

func TestWhatACrashLeavesIsTidiedUp(t *testing.T) {
	h := newHost(t)
	ctx := context.Background()
	tpl := create(t, h.manager(), named("app"), func(s *cube.TemplateSpec) { s.IdempotencyKey = "key" })

	// In a build; in a deletion; in the making of a size.
	for _, dir := range []string{"tpl-unfinished/sizes/.build-1x128", ".trash-tpl-deleted/sizes", tpl.ID + "/sizes/.build-2x256"} {
		if err := os.MkdirAll(filepath.Join(h.dir, dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	// After the directory of a template was renamed away and before its records went.
	if err := h.book.Commit(ctx, template.Entry{ID: "tpl-vanished", Name: "old", Key: "old-key"}); err != nil {
		t.Fatal(err)
	}
	// After the manifest and before the records of the build.
	if err := h.book.Forget(ctx, tpl.ID, []string{"app"}, []string{"key"}); err != nil {
		t.Fatal(err)
	}
	m := h.manager()
	if got := h.book.String(); got != tpl.ID+" app key" {
		t.Errorf("records: %s", got)
	}
	if id, err := m.Resolve(ctx, "app"); err != nil || id != tpl.ID {
		t.Errorf("%s, %v", id, err)
	}
	entries, _ := os.ReadDir(h.dir)
	sizes, _ := os.ReadDir(filepath.Join(h.dir, tpl.ID, "sizes"))
	if len(entries) != 1 || len(sizes) != 1 {
		t.Errorf("left: %v, %v", entries, sizes)
	}
}

func TestACommittedNameThatMovedStaysWhereItIs(t *testing.T) {
	h := newHost(t)
	m := h.manager()
	create(t, m, named("app"))
	newer := create(t, m, named("app"))
	if id, err := h.manager().Resolve(context.Background(), "app"); err != nil || id != newer.ID {
		t.Errorf("after a restart the name is of %s, %v", id, err)
	}
}

func TestABrokenManifestDoesNotStopTheOthers(t *testing.T) {
	h := newHost(t)
	m := h.manager()
	broken, good := create(t, m, named("broken")), create(t, m, named("good"))
	path := filepath.Join(h.dir, broken.ID, "manifest.json")
	if err := os.Truncate(path, 20); err != nil {
		t.Fatal(err)
	}
	m = h.manager()
	if id, err := m.Resolve(context.Background(), "good"); err != nil || id != good.ID {
		t.Errorf("%s, %v", id, err)
	}
	_, err := m.Resolve(context.Background(), "broken")
	wantCode(t, err, cube.CodeNotFound)
	if _, err := os.Stat(path); err != nil {
		t.Errorf("the broken template was removed: %v", err)
	}
	spec := small()
	spec.ID = broken.ID
	_, err = m.Create(context.Background(), spec, nil)
	wantCode(t, err, cube.CodeAlreadyExists)
	if _, err := os.Stat(path); err != nil {
		t.Errorf("a create removed the broken template: %v", err)
	}
}

func TestManyAtOnce(t *testing.T) {
	h := newHost(t)
	m := h.manager()
	base := create(t, m, named("base"))
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			tpl := create(t, m, named("name"))
			user := fmt.Sprint("sb-", i)
			if err := acquire(m, tpl.ID, cube.Resources{VCPUs: 1 + i%3}, user); err != nil {
				t.Error(err)
			}
			if err := acquire(m, "base", cube.Resources{VCPUs: 1 + i%3}, user); err != nil {
				t.Error(err)
			}
			m.Release(tpl.ID, user)
			m.Release(base.ID, user)
			if err := m.Delete(context.Background(), tpl.ID, false); err != nil {
				t.Error(err)
			}
			if _, err := m.List(context.Background()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	testenv.Eventually(t, 10*time.Second, func() error {
		if all, _ := m.List(context.Background()); len(all) != 1 {
			return errors.New("not all are gone")
		}
		return nil
	})
	if err := m.Delete(context.Background(), "base", false); err != nil {
		t.Error(err)
	}
	h.empty()
}
