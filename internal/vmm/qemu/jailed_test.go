package qemu

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/containerd"
	"github.com/cubesandbox/cubelet/internal/hosttest"
	"github.com/cubesandbox/cubelet/internal/runc"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

// realJail starts containerd and the slots of a node below the world's root.
func (w *world) realJail() *runc.Slots {
	w.t.Helper()
	path, err := exec.LookPath("runc")
	if err != nil {
		w.t.Fatalf("runc is missing: %v", err)
	}
	server, err := containerd.Start(context.Background(), containerd.Config{
		Root: w.path("containerd"), State: w.path("run/c"), Address: w.path("run/c.sock"), ShimSocketDir: w.path("run/s"),
		LibexecDir: filepath.Dir(testenv.Binary(w.t, "containerd-shim-runc-v2")), Log: discardLog(),
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(server.Stop)
	client, err := server.Client("test")
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = client.Close() })
	slots, err := runc.New(context.Background(), runc.Config{
		Client: client, RunDir: w.path("run/v"), Launcher: testenv.Binary(w.t, "vmm-launcher"), RuncBinary: path,
		RuncRoot: w.path("run/runc"), CgroupParent: "/" + filepath.Base(w.root), Exits: server.LostExits(), Log: discardLog(),
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() {
		if err := slots.Close(); err != nil {
			w.t.Error(err)
		}
	})
	return slots
}

// In the jail QEMU has no capability, another root and another user; it must find all
// that it needs in its descriptors, and LimitsFor must leave it room.
func TestTheJailedDriverKeepsToTheContract(t *testing.T) {
	w := newWorld(t)
	w.driver.jail = w.realJail()
	limits := w.driver.LimitsFor(cube.Resources{VCPUs: 1, MemoryMiB: testMemory})
	ctx, cancel := context.WithTimeout(context.Background(), guestTimeout)
	defer cancel()

	m := w.machine("template")
	m.Boot = &w.boot
	if _, err := w.driver.Claim(ctx, "template", limits); err != nil {
		t.Fatal(err)
	}
	g := newGuestNet(t)
	started := time.Now()
	if _, err := w.driver.Launch(ctx, "template", m, g.tap); err != nil {
		t.Fatal(err)
	}
	g.dial().must("set jailed", "ok")
	t.Logf("cold boot to the first answer: %v", time.Since(started))
	w.sealTemplate()

	clone := newGuestNet(t)
	hosttest.RunVMMs(t, hosttest.VMMCase{VMMs: w.driver, Limits: limits, Machine: w.restored("conform"), Tap: clone.tap})

	if _, err := w.driver.Claim(ctx, "full", limits); err != nil {
		t.Fatal(err)
	}
	full := newGuestNet(t)
	if _, err := w.driver.Launch(ctx, "full", w.restored("full"), full.tap); err != nil {
		t.Fatal(err)
	}
	guest := full.dial()
	guest.must("get", "jailed")
	guest.must("touch 160", "ok") // most of what the guest has: the cgroup must allow it
	guest.must("write full", "ok")
	guest.must("read", "full")
	w.status("full", "running")
	w.destroy("full")
	if _, err := os.Stat(w.path("memory")); err != nil {
		t.Error(err)
	}
}
