package qemu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// frozen returns the machine that goes on where the files of a freeze say.
func (w *world) frozen(owner string, f vmm.Freeze) vmm.Machine {
	w.t.Helper()
	m := w.machine(owner)
	m.MemoryPath, m.StatePath = f.MemoryPath, f.StatePath
	w.copy(f.MemoryPath+".layer", m.Disks[1].Path)
	return m
}

func (w *world) copy(from, to string) {
	w.t.Helper()
	b, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, b, 0o600)
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// freezeFiles names the files of a freeze; its layer is saved beside the memory.
func (w *world) freezeFiles(name, owner string) vmm.Freeze {
	f := vmm.Freeze{MemoryPath: w.path(name + ".memory"), StatePath: w.path(name + ".state")}
	f.WhileFrozen = func() error {
		b, err := os.ReadFile(w.path(owner + ".layer"))
		if err != nil {
			return err
		}
		return os.WriteFile(f.MemoryPath+".layer", b, 0o600)
	}
	return f
}

// Each generation is frozen while it runs, and the next one is restored from that.
func TestAFreezeOfAFreezeGoesOnWithAllThatWasWritten(t *testing.T) {
	w := newWorld(t)
	ctx := context.Background()
	w.bootTemplate()
	w.console("template", "tick 2")
	if _, err := w.driver.Freeze(ctx, "template", w.freezeFiles("booted", "template")); cube.CodeOf(err) != cube.CodeFailedPrecondition {
		t.Errorf("freeze of a machine that writes to its image = %v; want FailedPrecondition", err)
	}
	w.status("template", "running")
	w.sealTemplate()
	image := w.imageDigest()

	machine := w.restored("g0")
	for generation := range 3 {
		owner := fmt.Sprintf("g%d", generation)
		guest := w.mustLaunch(owner, machine).dial()
		if generation > 0 {
			guest.must("get", fmt.Sprintf("word%d", generation-1))
		}
		guest.must("set "+fmt.Sprintf("word%d", generation), "ok")
		guest.must("touch 16", "ok")
		f := w.freezeFiles(owner, owner)
		frozen, err := w.driver.Freeze(ctx, owner, f)
		if err != nil {
			t.Fatalf("generation %d: %v", generation, err)
		}
		t.Logf("generation %d: %d KiB dirty, stood still for %v: %v", generation, frozen.DirtyBytes>>10, frozen.Paused, frozen.Timings)
		if frozen.DirtyBytes < 16<<20 || frozen.DirtyBytes > 128<<20 {
			t.Errorf("%d bytes are dirty, the guest wrote 16 MiB", frozen.DirtyBytes)
		}
		w.status(owner, "running")
		guest.must("set after", "ok")
		machine = w.frozen(fmt.Sprintf("g%d", generation+1), f)
	}
	if w.imageDigest() != image {
		t.Error("the template's image changed")
	}
	last := w.mustLaunch("g3", machine).dial()
	last.must("get", "word2")
	last.transfer(64 << 10)
}

func TestAFreezeThatFailsLeavesNothingAndTheMachineRunning(t *testing.T) {
	w := newWorld(t)
	ctx := context.Background()
	w.bootTemplate()
	w.console("template", "tick 2")
	w.sealTemplate()
	guest := w.mustLaunch("a", w.restored("a")).dial()
	full := errors.New("the disk is full")
	f := w.freezeFiles("a", "a")
	f.WhileFrozen = func() error { return full }
	f.Stay = true
	if _, err := w.driver.Freeze(ctx, "a", f); !errors.Is(err, full) {
		t.Errorf("got %v", err)
	}
	for _, path := range []string{f.MemoryPath, f.StatePath} {
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", path, err)
		}
	}
	w.status("a", "running")
	guest.must("set kept", "ok")

	f.WhileFrozen = nil
	if _, err := w.driver.Freeze(ctx, "a", f); err != nil {
		t.Fatal(err)
	}
	w.status("a", "paused")
	if _, err := w.driver.Freeze(ctx, "b", f); !cube.IsNotFound(err) {
		t.Errorf("freeze of nobody = %v; want NotFound", err)
	}
	tap, err := w.driver.Tap(ctx, "a")
	if err != nil {
		t.Fatal(err)
	}
	defer tap.Close()
	request, err := unix.NewIfreq("any")
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlIfreq(int(tap.Fd()), unix.TUNGETIFF, request); err != nil || request.Name() == "" {
		t.Errorf("the tap is no network card: %v", err)
	}
}

// Holes stay holes, and what is between them is copied.
func TestExtentsAreCopiedWithTheirHoles(t *testing.T) {
	dir := t.TempDir()
	src, err := os.Create(dir + "/src")
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	const size = 8 << 20
	if err := src.Truncate(size); err != nil {
		t.Fatal(err)
	}
	for _, at := range []int64{1 << 20, 5 << 20} {
		if _, err := src.WriteAt(bytes.Repeat([]byte{9}, 4096), at); err != nil {
			t.Fatal(err)
		}
	}
	dst, err := os.Create(dir + "/dst")
	if err != nil {
		t.Fatal(err)
	}
	defer dst.Close()
	if err := dst.Truncate(size); err != nil {
		t.Fatal(err)
	}
	if err := copyExtents(dst, src, size); err != nil {
		t.Fatal(err)
	}
	want, _ := os.ReadFile(src.Name())
	got, _ := os.ReadFile(dst.Name())
	if !bytes.Equal(got, want) {
		t.Error("the copy differs")
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(dst.Fd()), &st); err != nil || st.Blocks*512 > size/4 {
		t.Errorf("the copy takes %d bytes: %v", st.Blocks*512, err)
	}
}
