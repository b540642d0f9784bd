package qemu

import (
	"context"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// One machine is booted, saved and cloned; the parts of the test build on each other.
func TestBootSaveAndRestoreOnARealGuest(t *testing.T) {
	w := newWorld(t)
	ctx := context.Background()

	g := w.bootTemplate()
	w.console("template", "testguest: ready")
	w.console("template", "tick 2")
	guest := g.dial()
	guest.must("first", "root")
	guest.must("set kept", "ok")
	guest.must("write layer", "ok")
	guest.transfer(256 << 10)
	checkOffloads(t, g)
	pauseAndResume(t, w, guest)

	saved := guest.ticks()
	w.sealTemplate()
	checkSealed(t, w)
	digest := w.imageDigest()

	a, b := w.mustLaunch("a", w.restored("a")), w.mustLaunch("b", w.restored("b"))
	inA, inB := a.dial(), b.dial()
	for name, in := range map[string]*guestConn{"a": inA, "b": inB} {
		if n := in.ticks(); n < saved {
			t.Errorf("clone %s counts %d ticks; the template had %d when it was saved", name, n, saved)
		}
		in.must("get", "kept")
		in.must("read", "layer")
	}
	inA.must("set other", "ok")
	inA.must("write changed", "ok")
	inA.must("touch 32", "ok")
	inB.must("get", "kept")
	inB.must("read", "layer")
	if w.imageDigest() != digest {
		t.Error("a running clone changed the memory image")
	}
	inB.transfer(256 << 10)
	checkOffloads(t, b)

	t.Run("a new driver controls the machines of the one before", func(t *testing.T) {
		w.driver = w.newDriver()
		pauseAndResume(t, w, nil)
		inA.must("get", "other")
		if all, err := w.driver.List(ctx); err != nil || len(all) != 2 {
			t.Errorf("list = %v, %v; want two", all, err)
		}
	})
	if err := w.driver.Quit(ctx, "b"); err != nil {
		t.Errorf("quit: %v", err)
	}
	if exit, err := w.driver.Wait(ctx, "b"); err != nil || exit.Code != 0 {
		t.Errorf("wait after quit = %+v, %v; want exit code 0", exit, err)
	}
	if _, err := w.driver.Status(ctx, "b"); cube.CodeOf(err) != cube.CodeFailedPrecondition {
		t.Errorf("status of a VMM that ended = %v; want FailedPrecondition", err)
	}
	w.destroy("a")
	w.destroy("b")
	t.Run("broken images are refused", func(t *testing.T) { refuseBrokenImages(t, w) })
	if w.imageDigest() != digest {
		t.Error("the memory image changed")
	}
}

// checkOffloads fails when QEMU did not tell the tap what the guest's driver takes: the
// tap of a restored machine is new and starts without.
func checkOffloads(t *testing.T, g *guestNet) {
	t.Helper()
	checksum, segmentation := g.offloads()
	if !checksum || !segmentation {
		t.Errorf("tap offloads: checksum %v, segmentation %v; want both", checksum, segmentation)
	}
}

// pauseAndResume stops and continues the machine "template", or "a" without a guest.
func pauseAndResume(t *testing.T, w *world, guest *guestConn) {
	t.Helper()
	ctx, owner := context.Background(), "a"
	if guest != nil {
		owner = "template"
	}
	for range 2 {
		if err := w.driver.Pause(ctx, owner); err != nil {
			t.Fatal(err)
		}
	}
	w.status(owner, "paused")
	before, err := os.ReadFile(w.path(owner + ".console"))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := w.driver.Resume(ctx, owner); err != nil {
			t.Fatal(err)
		}
	}
	w.status(owner, "running")
	w.console(owner, string(before)+"tick")
	if guest != nil {
		guest.must("get", "kept")
	}
}

func ownerOf(st os.FileInfo) uint32 { return st.Sys().(*syscall.Stat_t).Uid }

func checkSealed(t *testing.T, w *world) {
	t.Helper()
	for _, name := range []string{"memory", "state"} {
		st, err := os.Stat(w.path(name))
		if err != nil {
			t.Fatal(err)
		}
		if st.Mode().Perm() != 0o444 || ownerOf(st) != 0 {
			t.Errorf("%s is %v of user %d; want 0444 of root", name, st.Mode(), ownerOf(st))
		}
	}
}

// refuseBrokenImages restores what does not fit: each must fail with a clear error, and
// Destroy must find everything that is left.
func refuseBrokenImages(t *testing.T, w *world) {
	state, err := os.ReadFile(w.path("state"))
	if err != nil {
		t.Fatal(err)
	}
	write := func(name string, data []byte) string {
		if err := os.WriteFile(w.path(name), data, 0o444); err != nil {
			t.Fatal(err)
		}
		return w.path(name)
	}
	damaged := slices.Clone(state)
	for i := 8; i < 208; i++ { // the first section; content deeper inside has no checksum
		damaged[i] ^= 0xff
	}
	tests := map[string]struct {
		change func(m *vmm.Machine)
		code   cube.Code
		text   string
	}{
		"other memory size": {func(m *vmm.Machine) { m.MemoryMiB = 512 }, cube.CodeFailedPrecondition, "machine of 512 MiB"},
		"no memory":         {func(m *vmm.Machine) { m.MemoryPath = w.path("none") }, cube.CodeInternal, "no such file"},
		"foreign state":     {func(m *vmm.Machine) { m.StatePath = write("s1", []byte("not a device state")) }, cube.CodeFailedPrecondition, "not a QEMU device state"},
		"empty state":       {func(m *vmm.Machine) { m.StatePath = write("s2", nil) }, cube.CodeFailedPrecondition, "shorter than its header"},
		"truncated state":   {func(m *vmm.Machine) { m.StatePath = write("s3", state[:len(state)/2]) }, cube.CodeInternal, "QEMU says"},
		"damaged state":     {func(m *vmm.Machine) { m.StatePath = write("s4", damaged) }, cube.CodeInternal, "QEMU says"},
		"one disk less":     {func(m *vmm.Machine) { m.Disks = m.Disks[:1] }, cube.CodeInternal, "QEMU says"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			w.t = t
			m := w.restored("broken")
			test.change(&m)
			err := w.launch("broken", m, newGuestNet(t).tap)
			if err == nil || cube.CodeOf(err) != test.code || !strings.Contains(err.Error(), test.text) {
				t.Errorf("launch = %v (%v); want %v with %q", err, cube.CodeOf(err), test.code, test.text)
			}
			w.destroy("broken")
		})
	}
	w.t = t
}

func TestAFailedBootTellsWhatQEMUSaid(t *testing.T) {
	w := newWorld(t)
	m := w.machine("broken")
	m.Boot = &vmm.Boot{Kernel: w.disk("kernel", "no kernel at all"), Initrd: w.boot.Initrd, Cmdline: "quiet"}
	err := w.launch("broken", m, newGuestNet(t).tap)
	if err == nil || !strings.Contains(err.Error(), "QEMU says") {
		t.Errorf("launch = %v; want the end of QEMU's log", err)
	}
	if _, err := os.Stat(m.MemoryPath); !os.IsNotExist(err) {
		t.Errorf("memory file after a failed boot: %v; want none", err)
	}
	w.destroy("broken")
}

func TestAMachineWithoutNetworkBoots(t *testing.T) {
	w := newWorld(t)
	m := w.machine("alone")
	m.MAC, m.Boot = "", &w.boot
	if err := w.launch("alone", m, nil); err != nil {
		t.Fatal(err)
	}
	w.console("alone", "Link not found")
	w.destroy("alone")
}
