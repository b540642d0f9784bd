package template_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/containerd"
	"github.com/cubesandbox/cubelet/internal/guest"
	"github.com/cubesandbox/cubelet/internal/guestapi"
	"github.com/cubesandbox/cubelet/internal/image"
	"github.com/cubesandbox/cubelet/internal/initramfs"
	"github.com/cubesandbox/cubelet/internal/runc"
	"github.com/cubesandbox/cubelet/internal/template"
	"github.com/cubesandbox/cubelet/internal/testenv"
	"github.com/cubesandbox/cubelet/internal/tplimage"
	"github.com/cubesandbox/cubelet/internal/vmm"
	"github.com/cubesandbox/cubelet/internal/vmm/qemu"
	"github.com/cubesandbox/cubelet/networkagent"
	"github.com/cubesandbox/cubelet/storage"
)

// realHost is the wiring of a node without its engine.
type realHost struct {
	t       *testing.T
	root    string
	pool    *storage.Pool
	driver  *qemu.Driver
	network *networkagent.Agent
	guest   *guest.Client
	manager *template.Manager
}

func must[T any](t *testing.T) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func newRealHost(t *testing.T) *realHost {
	t.Helper()
	testenv.RequireRoot(t)
	testenv.Leaks(t)
	ctx := context.Background()
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	kernel := testenv.KernelDir(t)
	shim, launcher, agent := testenv.Binary(t, "containerd-shim-runc-v2"), testenv.Binary(t, "vmm-launcher"), testenv.Binary(t, "cube-agent")
	h := &realHost{t: t, root: testenv.TempRoot(t), guest: guest.New(log)}
	for _, dir := range []string{"vmm", "qemu"} {
		if err := os.Mkdir(filepath.Join(h.root, dir), 0o711); err != nil {
			t.Fatal(err)
		}
	}
	h.pool = must[*storage.Pool](t)(storage.OpenPool(ctx, storage.Config{Dir: h.path("pool"), Image: h.path("pool.img"), SizeBytes: 4 << 30, Log: log}))
	h.cleanup(func() error { return h.pool.Close(true) })

	server := must[*containerd.Server](t)(containerd.Start(ctx, containerd.Config{
		Root: h.path("c"), State: h.path("s"), Address: h.path("c.sock"), ShimSocketDir: h.path("h"), LibexecDir: filepath.Dir(shim), Log: log,
	}))
	t.Cleanup(server.Stop)
	client, err := server.Client("cubelet")
	if err != nil {
		t.Fatal(err)
	}
	h.cleanup(client.Close)
	slots := must[*runc.Slots](t)(runc.New(ctx, runc.Config{
		Client: client, RunDir: h.path("vmm"), Launcher: launcher, RuncBinary: must[string](t)(exec.LookPath("runc")),
		RuncRoot: h.path("runc"), CgroupParent: "/cubelet-" + testenv.Tag(h.root), Log: log,
	}))
	h.cleanup(slots.Close)
	h.driver = must[*qemu.Driver](t)(qemu.New(qemu.Config{
		Jail: slots, Binary: must[string](t)(exec.LookPath("qemu-system-x86_64")), RunDir: h.path("qemu"), Accel: qemu.AccelTCG, Log: log,
	}))
	h.network = must[*networkagent.Agent](t)(networkagent.New(networkagent.Config{RunDir: h.path("net"), Node: testenv.Tag(h.root), Log: log}))
	h.cleanup(h.network.Close)

	release := strings.TrimSpace(string(must[[]byte](t)(os.ReadFile(filepath.Join(kernel, "release")))))
	if err := initramfs.BuildFile(h.path("initrd"), initramfs.Config{Agent: agent, ModulesDir: filepath.Join(kernel, "modules"), Release: release}); err != nil {
		t.Fatal(err)
	}
	h.manager = must[*template.Manager](t)(template.New(template.Config{
		Dir: h.pool.TemplatesDir(), Images: must[*image.Store](t)(image.New(image.Config{ScratchDir: h.pool.ScratchDir(), Log: log})),
		VMMs: h.driver, Network: h.network, Disks: h.pool, Guest: h.guest, Records: newBook(),
		Machine: must[cube.MachineInfo](t)(h.driver.MachineInfo(ctx)), Kernel: filepath.Join(kernel, "vmlinuz"), Initrd: h.path("initrd"),
		Cmdline: initramfs.Cmdline(), Nameservers: h.network.Nameservers(), Limits: h.driver.LimitsFor, Log: log,
	}))
	h.cleanup(h.manager.Close)
	return h
}

func (h *realHost) path(name string) string { return filepath.Join(h.root, name) }

func (h *realHost) cleanup(f func() error) {
	h.t.Cleanup(func() {
		if err := f(); err != nil {
			h.t.Error(err)
		}
	})
}

// archive packs an image of one static program that is its shell as well.
func (h *realHost) archive() string {
	h.t.Helper()
	program := h.path("program")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", program, "./internal/template/testdata/guest")
	cmd.Dir, cmd.Env = testenv.Repo(h.t), append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		h.t.Fatalf("%v\n%s", err, out)
	}
	content := must[[]byte](h.t)(os.ReadFile(program))
	layer := tarOf(h.t, map[string][]byte{"bin/sh": content})
	config := must[[]byte](h.t)(json.Marshal(map[string]any{
		"os": "linux", "architecture": "amd64",
		"config": map[string]any{"Env": []string{"FROM=image"}, "Entrypoint": []string{"/bin/sh"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(layer))}},
	}))
	path := h.path("image.tar")
	docker := tarOf(h.t, map[string][]byte{
		"manifest.json": []byte(`[{"Config":"config.json","RepoTags":["app:1"],"Layers":["layer.tar"]}]`),
		"config.json":   config, "layer.tar": layer,
	})
	if err := os.WriteFile(path, docker, 0o600); err != nil {
		h.t.Fatal(err)
	}
	return path
}

func tarOf(t *testing.T, files map[string][]byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for name, content := range files {
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(content))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// restore runs a sandbox of the image and calls use while it lives.
func (h *realHost) restore(owner string, img tplimage.Image, use func(ctx context.Context, dial guestapi.Dialer, token string)) {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	dir := must[string](h.t)(h.pool.Create(ctx, owner))
	defer func() {
		for _, undo := range []func(context.Context, string) error{h.driver.Destroy, h.network.Release, h.pool.Remove} {
			if err := undo(context.Background(), owner); err != nil {
				h.t.Error(err)
			}
		}
	}()
	layer := filepath.Join(dir, "layer")
	if err := h.pool.Clone(ctx, img.LayerPath, layer); err != nil {
		h.t.Error(err)
		return
	}
	if _, err := h.driver.Claim(ctx, owner, h.driver.LimitsFor(img.Resources)); err != nil {
		h.t.Error(err)
		return
	}
	tap, err := h.network.Claim(ctx, owner, cube.NetworkSpec{})
	if err != nil {
		h.t.Error(err)
		return
	}
	defer tap.Close()
	_, err = h.driver.Launch(ctx, owner, vmm.Machine{
		VCPUs: img.Resources.VCPUs, MemoryMiB: img.Resources.MemoryMiB, MemoryPath: img.MemoryPath, StatePath: img.StatePath,
		Disks: []vmm.Disk{{Path: img.RootPath, ReadOnly: true}, {Path: layer}}, MAC: img.MAC, ConsolePath: filepath.Join(dir, "console.log"),
	}, tap)
	if err != nil {
		h.t.Error(err)
		return
	}
	dial := func(ctx context.Context, port int) (net.Conn, error) { return h.network.Dial(ctx, owner, port) }
	entropy := make([]byte, 32)
	rand.Read(entropy)
	in := guestapi.Init{
		SandboxID: owner, TemplateID: img.TemplateID, Hostname: owner, MachineID: hex.EncodeToString(entropy[:16]),
		AccessToken: "token-" + owner, Entropy: entropy, Time: time.Now(), Env: img.Env, Entrypoint: img.Config.Entrypoint,
	}
	if err := h.guest.Init(ctx, dial, in); err != nil {
		h.t.Error(err)
		return
	}
	use(ctx, dial, in.AccessToken)
}

// number asks the server in a guest for its number.
func number(ctx context.Context, t *testing.T, dial guestapi.Dialer) string {
	t.Helper()
	conn, err := dial(ctx, 8080)
	if err != nil {
		t.Error(err)
		return ""
	}
	defer conn.Close()
	text, err := io.ReadAll(conn)
	memory, disk, _ := strings.Cut(strings.TrimSpace(string(text)), " ")
	if err != nil || memory == "" || disk != memory+" <nil>" {
		t.Errorf("%q, %v: memory and disk are not of one instant", text, err)
	}
	return memory
}

func TestARealTemplateGoesOnInEveryRestoredMachine(t *testing.T) {
	h := newRealHost(t)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	spec := cube.TemplateSpec{
		ArchivePath: h.archive(), Name: "app", DiskMiB: 64, Resources: cube.Resources{VCPUs: 1, MemoryMiB: 192},
		StartCommand: "serve", Ready: cube.ReadySpec{Port: 8080}, Env: map[string]string{"FROM": "template"},
	}
	tpl, err := h.manager.Create(ctx, spec, func(p cube.TemplateProgress) { t.Logf("%6.2f s %s %s", p.Elapsed.Seconds(), p.Stage, p.Message) })
	if err != nil {
		t.Fatal(err)
	}
	numbers := map[string]bool{}
	for i, size := range []cube.Resources{{}, {}, {VCPUs: 2, MemoryMiB: 256}} {
		owner := fmt.Sprint("sb-", i)
		img, err := h.manager.Acquire(ctx, "app", size, owner)
		if err != nil {
			t.Fatal(err)
		}
		h.restore(owner, img, func(ctx context.Context, dial guestapi.Dialer, token string) {
			numbers[number(ctx, t, dial)] = true
			out, _, code, err := h.guest.Run(ctx, dial, token, cube.ExecSpec{})
			if err != nil || code != 0 || string(out) != "env template\n" {
				t.Errorf("exec: %q, %d, %v", out, code, err)
			}
		})
		h.manager.Release(tpl.ID, owner)
	}
	if len(numbers) != 2 {
		t.Errorf("%d different servers, want one for each size", len(numbers))
	}
	if err := h.manager.Delete(ctx, "app", false); err != nil {
		t.Error(err)
	}
}

func TestARealBuildThatFailsLeavesNothing(t *testing.T) {
	h := newRealHost(t)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	spec := cube.TemplateSpec{
		ArchivePath: h.archive(), DiskMiB: 64, Resources: cube.Resources{VCPUs: 1, MemoryMiB: 192},
		StartCommand: "fail", Ready: cube.ReadySpec{Port: 8080},
	}
	_, err := h.manager.Create(ctx, spec, nil)
	wantCode(t, err, cube.CodeFailedPrecondition)
	if err == nil || !strings.Contains(err.Error(), "told to fail") || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("got %v", err)
	}
	if entries, err := os.ReadDir(h.pool.TemplatesDir()); err != nil || len(entries) > 0 {
		t.Errorf("left %v, %v", entries, err)
	}
	if all, err := h.driver.List(ctx); err != nil || len(all) > 0 {
		t.Errorf("left %v, %v", all, err)
	}
}
