package initramfs

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cavaliergopher/cpio"
	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"

	"github.com/cubesandbox/cubelet/internal/testenv"
)

const release = "6.1.0-1-test"

// kernelTree writes modules into a directory: content by path, "" for what is built in.
func kernelTree(t *testing.T, files map[string][]byte, builtin ...string) string {
	t.Helper()
	dir := t.TempDir()
	for name, data := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	list := strings.Join(builtin, "\n") + "\n"
	if err := os.WriteFile(filepath.Join(dir, "modules.builtin"), []byte(list), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

// guestTree has all that a guest needs, spelled as distributions do.
func guestTree(t *testing.T) string {
	t.Helper()
	return kernelTree(t, map[string][]byte{
		"kernel/drivers/virtio/virtio.ko":             fakeModule("depends=virtio_ring"),
		"kernel/drivers/virtio/virtio_ring.ko.xz":     packXZ(t, fakeModule("depends=")),
		"kernel/drivers/virtio/virtio_mmio.ko.zst":    packZstd(t, fakeModule("depends=virtio,virtio_ring")),
		"kernel/drivers/block/virtio_blk.ko":          fakeModule("depends=virtio"),
		"kernel/drivers/net/virtio_net.ko":            fakeModule("depends=net_failover,virtio"),
		"kernel/drivers/net/net_failover.ko":          fakeModule("depends=failover"),
		"kernel/net/core/failover.ko":                 fakeModule("depends="),
		"kernel/drivers/char/hw_random/virtio-rng.ko": fakeModule("depends=virtio"),
		"kernel/fs/erofs/erofs.ko":                    fakeModule("depends=libcrc32c"),
		"kernel/lib/libcrc32c.ko":                     fakeModule("softdep=pre: crc32c crc-helper post: later", "depends="),
		"kernel/lib/crc-helper.ko":                    fakeModule("depends="),
		"kernel/fs/overlayfs/overlay.ko":              fakeModule("depends="),
		"kernel/fs/fuse/fuse.ko":                      fakeModule("depends="),
		"kernel/unused.ko":                            fakeModule("depends="),
	}, "kernel/fs/ext4/ext4.ko")
}

func packXZ(t *testing.T, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := xz.NewWriter(&b)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func packZstd(t *testing.T, data []byte) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	return w.EncodeAll(data, nil)
}

func testConfig(t *testing.T) Config {
	t.Helper()
	agent := filepath.Join(t.TempDir(), "agent")
	if err := os.WriteFile(agent, []byte("\x7fELF agent"), 0o755); err != nil {
		t.Fatal(err)
	}
	return Config{Agent: agent, ModulesDir: guestTree(t), Release: release}
}

// readArchive returns the archive's headers in order, and its files.
func readArchive(t *testing.T, archive []byte) ([]*cpio.Header, map[string][]byte) {
	t.Helper()
	r := cpio.NewReader(bytes.NewReader(archive))
	var headers []*cpio.Header
	files := map[string][]byte{}
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return headers, files
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		headers, files[h.Name] = append(headers, h), data
	}
}

func TestModulesComeAfterTheirDependenciesAndInflated(t *testing.T) {
	var b bytes.Buffer
	if err := Build(&b, testConfig(t)); err != nil {
		t.Fatal(err)
	}
	headers, files := readArchive(t, b.Bytes())
	var names []string
	for _, h := range headers {
		if dir, name := filepath.Split(h.Name); dir == "modules/" {
			names = append(names, name)
			if !bytes.HasPrefix(files[h.Name], []byte("\x7fELF")) {
				t.Errorf("%s is not inflated", name)
			}
		}
	}
	want := []string{
		"000-virtio_ring.ko", "001-virtio.ko", "002-virtio_mmio.ko", "003-virtio_blk.ko",
		"004-failover.ko", "005-net_failover.ko", "006-virtio_net.ko", "007-virtio_rng.ko",
		"008-crc_helper.ko", "009-libcrc32c.ko", "010-erofs.ko", "011-overlay.ko", "012-fuse.ko",
	}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("modules (-want +got):\n%s", diff)
	}
	if !slices.IsSorted(names) {
		t.Error("the order of names is not the order of loading")
	}
}

func TestTheArchiveStartsAGuest(t *testing.T) {
	var b bytes.Buffer
	if err := Build(&b, testConfig(t)); err != nil {
		t.Fatal(err)
	}
	headers, files := readArchive(t, b.Bytes())
	modes := map[string]cpio.FileMode{}
	for _, h := range headers {
		modes[h.Name] = h.Mode
	}
	for name, want := range map[string]cpio.FileMode{
		"init": cpio.TypeReg | 0o755, "dev": cpio.TypeDir | 0o755, "proc": cpio.TypeDir | 0o755,
		"sys": cpio.TypeDir | 0o755, "dev/console": cpio.TypeChar | 0o600,
	} {
		if modes[name] != want {
			t.Errorf("%s has mode %o; want %o", name, modes[name], want)
		}
	}
	if string(files["init"]) != "\x7fELF agent" {
		t.Errorf("init is %q", files["init"])
	}
	// Major and minor of the console, which the cpio package does not decode.
	console := bytes.Index(b.Bytes(), []byte("dev/console"))
	if header := string(b.Bytes()[console-110 : console]); header[78:94] != "0000000500000001" {
		t.Errorf("device numbers of the console: %s", header[78:94])
	}
	if b.Len()%4 != 0 {
		t.Errorf("the archive has %d bytes", b.Len())
	}
}

func TestTheSameInputsGiveTheSameArchive(t *testing.T) {
	cfg := testConfig(t)
	var a, b bytes.Buffer
	if err := errors.Join(Build(&a, cfg), Build(&b, cfg)); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(a.Bytes(), b.Bytes()) {
		t.Error("two archives differ")
	}
}

func TestWhatCannotWorkIsRefused(t *testing.T) {
	tests := map[string]struct {
		change func(t *testing.T, cfg *Config)
		text   string
	}{
		"no agent":        {func(_ *testing.T, cfg *Config) { cfg.Agent += "x" }, "guest agent"},
		"script as agent": {func(_ *testing.T, cfg *Config) { write(t, cfg.Agent, "#!/bin/sh") }, "not an ELF"},
		"no modules":      {func(t *testing.T, cfg *Config) { cfg.ModulesDir = t.TempDir() }, "modules.builtin"},
		"other kernel":    {func(_ *testing.T, cfg *Config) { cfg.Release = "6.2" }, `is built for kernel "6.1.0-1-test", not "6.2"`},
		"module missing":  {func(t *testing.T, cfg *Config) { remove(t, cfg, "kernel/fs/erofs/erofs.ko") }, "no module erofs"},
		"dependency missing": {
			func(t *testing.T, cfg *Config) { remove(t, cfg, "kernel/net/core/failover.ko") },
			"virtio_net needs: net_failover needs: kernel 6.1.0-1-test has no module failover",
		},
		"damaged module": {func(t *testing.T, cfg *Config) {
			write(t, filepath.Join(cfg.ModulesDir, "kernel/drivers/virtio/virtio_ring.ko.xz"), "no xz")
		}, "virtio_ring.ko.xz"},
		"module of another kind": {func(t *testing.T, cfg *Config) {
			write(t, filepath.Join(cfg.ModulesDir, "kernel/fs/fuse/fuse.ko"), "\x7fELF")
		}, "fuse.ko"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			cfg := testConfig(t)
			test.change(t, &cfg)
			path := filepath.Join(t.TempDir(), "initrd.img")
			if err := BuildFile(path, cfg); err == nil || !strings.Contains(err.Error(), test.text) {
				t.Errorf("error = %v; want %q", err, test.text)
			}
			if _, err := os.Stat(path); !os.IsNotExist(err) {
				t.Errorf("an archive was left: %v", err)
			}
		})
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func remove(t *testing.T, cfg *Config, name string) {
	t.Helper()
	if err := os.Remove(filepath.Join(cfg.ModulesDir, name)); err != nil {
		t.Fatal(err)
	}
}

func TestBuildFileBuildsOnlyWhenSomethingChanged(t *testing.T) {
	cfg := testConfig(t)
	path := filepath.Join(t.TempDir(), "initrd.img")
	inode := func() os.FileInfo {
		t.Helper()
		if err := BuildFile(path, cfg); err != nil {
			t.Fatal(err)
		}
		st, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		return st
	}
	first := inode()
	if !os.SameFile(first, inode()) {
		t.Error("the same inputs were built again")
	}
	write(t, cfg.Agent, "\x7fELF newer")
	second := inode()
	if os.SameFile(first, second) {
		t.Error("a new agent was not built in")
	}
	if err := os.Truncate(path, 10); err != nil {
		t.Fatal(err)
	}
	if third := inode(); third.Size() != second.Size() {
		t.Errorf("a truncated archive stayed: %d bytes", third.Size())
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	inode()
}

func TestTheRealKernelHasAllThatAGuestNeeds(t *testing.T) {
	kernel := testenv.KernelDir(t)
	text, err := os.ReadFile(filepath.Join(kernel, "release"))
	if err != nil {
		t.Fatal(err)
	}
	modules, err := resolve(filepath.Join(kernel, "modules"), strings.TrimSpace(string(text)), guestModules())
	if err != nil {
		t.Fatal(err)
	}
	position := map[string]int{}
	for i, m := range modules {
		position[m.name] = i + 1
	}
	for _, pair := range [][2]string{{"virtio_ring", "virtio"}, {"virtio", "virtio_mmio"}, {"net_failover", "virtio_net"}} {
		if before, after := position[pair[0]], position[pair[1]]; before == 0 || after <= before {
			t.Errorf("%s is module %d and %s %d", pair[0], before, pair[1], after)
		}
	}
}

func TestCmdlineTellsTheAgentItsWorld(t *testing.T) {
	want := "console=ttyS0 quiet reboot=t panic=-1 cryptomgr.notests edd=off rdinit=/init " +
		"cube.root=/dev/vda cube.layer=/dev/vdb cube.address=169.254.0.22/30 cube.gateway=169.254.0.21 cube.x=1"
	if diff := cmp.Diff(want, Cmdline("cube.x=1")); diff != "" {
		t.Error(diff)
	}
}
