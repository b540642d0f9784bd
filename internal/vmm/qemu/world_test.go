package qemu

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cubelet/internal/initramfs"
	"github.com/cubesandbox/cubelet/internal/testenv"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

const (
	// guestTimeout is for an emulated guest on a machine that is busy with other tests.
	guestTimeout = 3 * time.Minute
	testBinary   = "/usr/bin/qemu-system-x86_64"
	testMAC      = "02:cb:00:00:00:01"
	testMemory   = 256 // MiB
)

// world is everything that real machines need.
type world struct {
	t      testing.TB
	root   string
	jail   *testJail
	driver *Driver
	boot   vmm.Boot
}

func newWorld(t testing.TB) *world {
	t.Helper()
	testenv.RequireRoot(t)
	testenv.Leaks(t)
	w := &world{t: t, root: testenv.TempRoot(t)}
	for _, dir := range []string{"run", "jail"} {
		if err := os.Mkdir(w.path(dir), 0o711); err != nil {
			t.Fatal(err)
		}
	}
	w.jail = newTestJail(t, w.path("jail"))
	w.driver = w.newDriver()
	kernel := testenv.KernelDir(t)
	release, err := os.ReadFile(filepath.Join(kernel, "release"))
	if err != nil {
		t.Fatal(err)
	}
	w.boot = vmm.Boot{Kernel: filepath.Join(kernel, "vmlinuz"), Initrd: w.path("initrd.img"), Cmdline: initramfs.Cmdline()}
	err = initramfs.BuildFile(w.boot.Initrd, initramfs.Config{
		Agent:      buildTestGuest(t, w.path("testguest")),
		ModulesDir: filepath.Join(kernel, "modules"),
		Release:    strings.TrimSpace(string(release)),
	})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func buildTestGuest(t testing.TB, path string) string {
	t.Helper()
	cmd := exec.Command("go", "build", "-trimpath", "-o", path, "./testguest")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the test guest: %v\n%s", err, out)
	}
	return path
}

func (w *world) path(name string) string { return filepath.Join(w.root, name) }

// newDriver returns a driver that knows nothing but RunDir and the jail: what a
// restarted daemon has.
func (w *world) newDriver() *Driver {
	w.t.Helper()
	d, err := New(Config{Jail: w.jail, Binary: testBinary, RunDir: w.path("run"), Accel: AccelTCG, Log: discardLog()})
	if err != nil {
		w.t.Fatal(err)
	}
	return d
}

// machine returns a machine of the owner with two disks, made here: the first holds the
// word "root", the second is empty.
func (w *world) machine(owner string) vmm.Machine {
	w.t.Helper()
	return vmm.Machine{
		VCPUs:       1,
		MemoryMiB:   testMemory,
		MemoryPath:  w.path("memory"),
		Disks:       []vmm.Disk{{Path: w.disk("root", "root"), ReadOnly: true}, {Path: w.disk(owner+".layer", "")}},
		MAC:         testMAC,
		ConsolePath: w.path(owner + ".console"),
	}
}

func (w *world) disk(name, content string) string {
	w.t.Helper()
	block := make([]byte, 1<<20)
	copy(block, content)
	if err := os.WriteFile(w.path(name), block, 0o600); err != nil {
		w.t.Fatal(err)
	}
	return w.path(name)
}

// restored returns the machine of a clone of the template, its layer a copy.
func (w *world) restored(owner string) vmm.Machine {
	w.t.Helper()
	m := w.machine(owner)
	m.StatePath = w.path("state")
	layer, err := os.ReadFile(w.path("template.layer"))
	if err != nil {
		w.t.Fatal(err)
	}
	if err := os.WriteFile(m.Disks[1].Path, layer, 0o600); err != nil {
		w.t.Fatal(err)
	}
	return m
}

// launch claims a slot and launches m with the tap.
func (w *world) launch(owner string, m vmm.Machine, tap *os.File) error {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), guestTimeout)
	defer cancel()
	if _, err := w.driver.Claim(ctx, owner, vmm.Limits{}); err != nil {
		w.t.Fatal(err)
	}
	_, err := w.driver.Launch(ctx, owner, m, tap)
	return err
}

func (w *world) mustLaunch(owner string, m vmm.Machine) *guestNet {
	w.t.Helper()
	g := newGuestNet(w.t)
	if err := w.launch(owner, m, g.tap); err != nil {
		w.t.Fatal(err)
	}
	return g
}

// bootTemplate boots the machine that the clones come from.
func (w *world) bootTemplate() *guestNet {
	w.t.Helper()
	m := w.machine("template")
	m.Boot = &w.boot
	return w.mustLaunch("template", m)
}

// sealTemplate saves, destroys and seals it.
func (w *world) sealTemplate() {
	w.t.Helper()
	ctx := context.Background()
	if err := w.driver.Save(ctx, "template", w.path("state")); err != nil {
		w.t.Fatal(err)
	}
	w.destroy("template")
	if err := Seal(w.path("memory"), w.path("state")); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) destroy(owner string) {
	w.t.Helper()
	for range 2 {
		if err := w.driver.Destroy(context.Background(), owner); err != nil {
			w.t.Fatal(err)
		}
	}
	left, err := filepath.Glob(w.path("run/" + owner + "*"))
	if err != nil || len(left) > 0 {
		w.t.Errorf("left after destroy: %v, %v", left, err)
	}
}

// console waits until the owner's console shows the text.
func (w *world) console(owner, text string) {
	w.t.Helper()
	testenv.Eventually(w.t, guestTimeout, func() error {
		b, err := os.ReadFile(w.path(owner + ".console"))
		if err == nil && !strings.Contains(string(b), text) {
			err = fmt.Errorf("console shows no %q, but %.2000q", text, b)
		}
		return err
	})
}

func (w *world) status(owner, want string) {
	w.t.Helper()
	got, err := w.driver.Status(context.Background(), owner)
	if err != nil || got != want {
		w.t.Errorf("status of %s = %q, %v; want %q", owner, got, err, want)
	}
}

// imageDigest sums the template's memory and state.
func (w *world) imageDigest() string {
	w.t.Helper()
	h := sha256.New()
	for _, name := range []string{"memory", "state"} {
		f, err := os.Open(w.path(name))
		if err != nil {
			w.t.Fatal(err)
		}
		_, err = io.Copy(h, f)
		if err := errors.Join(err, f.Close()); err != nil {
			w.t.Fatal(err)
		}
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}

func discardLog() *slog.Logger { return slog.New(slog.DiscardHandler) }
