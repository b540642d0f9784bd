package storage

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

func TestFilesSurviveReopening(t *testing.T) {
	testenv.Leaks(t)
	cfg := testConfig(t)
	for _, unmount := range []bool{false, true} {
		p := openPool(t, cfg)
		if !p.Reflink() {
			t.Error("a pool in an image has no reflinks")
		}
		dir, err := p.SandboxDir("sb-1")
		if err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		writeFile(t, filepath.Join(dir, "layer"), []byte("data"))
		writeFile(t, filepath.Join(p.ScratchDir(), "left"), nil)
		if err := p.Close(unmount); err != nil {
			t.Fatal(err)
		}
		p = openPool(t, cfg)
		if got := readFile(t, filepath.Join(dir, "layer")); string(got) != "data" {
			t.Errorf("unmount %v: file holds %q", unmount, got)
		}
		if _, err := os.Lstat(filepath.Join(p.ScratchDir(), "left")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("unmount %v: scratch was not emptied: %v", unmount, err)
		}
		if err := p.Close(true); err != nil {
			t.Fatal(err)
		}
	}
	if mounted, err := isMountRoot(cfg.Dir); err != nil || mounted {
		t.Errorf("still mounted after Close(true): %v, %v", mounted, err)
	}
}

func TestSecondDaemonIsKeptOut(t *testing.T) {
	cfg := testConfig(t)
	openPool(t, cfg)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := OpenPool(ctx, cfg); cube.CodeOf(err) != cube.CodeCanceled {
		t.Errorf("open of a pool in use with a dead context: %v, want Canceled", err)
	}
	if _, err := OpenPool(t.Context(), cfg); cube.CodeOf(err) != cube.CodeFailedPrecondition {
		t.Errorf("open of a pool in use: %v, want FailedPrecondition", err)
	}
}

func TestOwnReflinkFileSystemNeedsNoImage(t *testing.T) {
	outer := newPool(t)
	inner := openPool(t, Config{Dir: filepath.Join(outer.ScratchDir(), "pool"), Image: filepath.Join(outer.ScratchDir(), "pool.img")})
	if !inner.Reflink() || pathExists(filepath.Join(outer.ScratchDir(), "pool.img")) {
		t.Errorf("reflink %v, or an image was made", inner.Reflink())
	}
	if err := inner.Close(true); err != nil {
		t.Fatal(err)
	}
	if mounted, err := isMountRoot(outer.Dir()); err != nil || !mounted {
		t.Errorf("closing the inner pool unmounted the host's file system: %v, %v", mounted, err)
	}
}

func TestNoReflinkNeedsPermission(t *testing.T) {
	root := tmpfs(t, "64m")
	_, err := OpenPool(t.Context(), Config{Dir: filepath.Join(root, "pool")})
	if cube.CodeOf(err) != cube.CodeFailedPrecondition {
		t.Errorf("open without reflinks: %v, want FailedPrecondition", err)
	}
	p := openPool(t, Config{Dir: filepath.Join(root, "pool"), Image: filepath.Join(root, "pool.img"), AllowNoReflink: true})
	if p.Reflink() {
		t.Error("tmpfs with reflinks")
	}
	if pathExists(filepath.Join(root, "pool.img")) {
		t.Error("an image was made although the host has no space for one")
	}
}

func TestImpossibleImagesAreRefused(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(c *Config)
		want   cube.Code
	}{
		{"host has too little free", func(c *Config) { c.MinFreeBytes = 1 << 60 }, cube.CodeNoSpace},
		{"size too small", func(c *Config) { c.SizeBytes = 1 << 20 }, cube.CodeInvalid},
		{"relative directory", func(c *Config) { c.Dir = "pool" }, cube.CodeInvalid},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := testConfig(t)
			tc.change(&cfg)
			if _, err := OpenPool(t.Context(), cfg); cube.CodeOf(err) != tc.want {
				t.Errorf("error %v, want code %v", err, tc.want)
			}
			if pathExists(cfg.Image) || pathExists(cfg.Image+tempSuffix) {
				t.Error("an image is left")
			}
		})
	}
}

func TestDamagedImageIsNamedAndKept(t *testing.T) {
	for _, tc := range []struct {
		name   string
		damage func(t *testing.T, image string)
	}{
		{"empty", func(t *testing.T, image string) { truncate(t, image, 0) }},
		{"truncated", func(t *testing.T, image string) { truncate(t, image, 100<<20) }},
		{"other content", func(t *testing.T, image string) { overwrite(t, image, 0, "this is no file system") }},
		{"broken superblock", func(t *testing.T, image string) { overwrite(t, image, 20, "\xff\xff\xff\xff\xff\xff\xff\xff") }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := testConfig(t)
			if err := openPool(t, cfg).Close(true); err != nil {
				t.Fatal(err)
			}
			tc.damage(t, cfg.Image)
			before := allocated(t, cfg.Image)
			cfg.AllowNoReflink = true // must not hide the image's data behind an empty pool
			_, err := OpenPool(t.Context(), cfg)
			if cube.CodeOf(err) != cube.CodeFailedPrecondition || !strings.Contains(err.Error(), "damaged") {
				t.Errorf("error %v, want FailedPrecondition that says damaged", err)
			}
			if allocated(t, cfg.Image) != before {
				t.Error("the image was changed")
			}
		})
	}
}

func truncate(t *testing.T, path string, size int64) {
	t.Helper()
	if err := os.Truncate(path, size); err != nil {
		t.Fatal(err)
	}
}

func overwrite(t *testing.T, path string, at int64, text string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteAt([]byte(text), at)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
}

// allocated returns a file's size and how many blocks it has.
func allocated(t *testing.T, path string) [2]int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return [2]int64{st.Size, st.Blocks}
}

// TestKilledMkfsLeavesNoImage ends the make of an image half-way, by its context and by
// the death of the daemon, of which the next one finds the file.
func TestKilledMkfsLeavesNoImage(t *testing.T) {
	cfg := testConfig(t)
	bin := t.TempDir()
	started := filepath.Join(bin, "started")
	script := "#!/bin/sh\nfor image; do :; done\nprintf XFSB >$image\n: >" + started + "\nexec sleep 60\n"
	if err := os.WriteFile(filepath.Join(bin, "mkfs.xfs"), []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	path := os.Getenv("PATH")
	t.Setenv("PATH", bin+":"+path)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	result := make(chan error, 1)
	go func() {
		_, err := OpenPool(ctx, cfg)
		result <- err
	}()
	testenv.Eventually(t, 10*time.Second, func() error {
		_, err := os.Stat(started)
		return err
	})
	cancel()
	if err := <-result; cube.CodeOf(err) != cube.CodeCanceled {
		t.Errorf("error %v, want Canceled", err)
	}
	if pathExists(cfg.Image) || pathExists(cfg.Image+tempSuffix) {
		t.Error("a half-made image is left")
	}
	t.Setenv("PATH", path)
	writeFile(t, cfg.Image+tempSuffix, []byte("XFSB of a daemon that was killed"))
	p := openPool(t, cfg)
	if err := p.Probe(t.Context()); err != nil {
		t.Error(err)
	}
	if pathExists(cfg.Image + tempSuffix) {
		t.Error("the half-made image of the earlier daemon is left")
	}
}

func TestMissingMkfsIsExplained(t *testing.T) {
	cfg := testConfig(t)
	t.Setenv("PATH", t.TempDir())
	_, err := OpenPool(t.Context(), cfg)
	var e *cube.Error
	if !errors.As(err, &e) || e.Code != cube.CodeFailedPrecondition || !strings.Contains(e.Hint, "xfsprogs") {
		t.Errorf("error %#v, want FailedPrecondition with a hint", err)
	}
}

// TestImageAttachedElsewhereIsShared mounts the image a second time, as a daemon in
// another mount namespace finds it: both must be one file system.
func TestImageAttachedElsewhereIsShared(t *testing.T) {
	cfg := testConfig(t)
	p := openPool(t, cfg)
	other := cfg
	other.Dir = cfg.Dir + "2"
	if err := p.release(); err != nil { // its daemon is gone, its mount is not
		t.Fatal(err)
	}
	q := openPool(t, other)
	writeFile(t, filepath.Join(q.ScratchDir(), "x"), []byte("through the second mount"))
	if got := readFile(t, filepath.Join(cfg.Dir, scratchName, "x")); string(got) != "through the second mount" {
		t.Errorf("the first mount has %q", got)
	}
	if err := q.Close(true); err != nil {
		t.Fatal(err)
	}
	if err := unix.Unmount(cfg.Dir, 0); err != nil {
		t.Fatal(err)
	}
}

// TestDirtyLogIsRecovered shuts the file system down without writing its log back, as a
// power failure does.
func TestDirtyLogIsRecovered(t *testing.T) {
	cfg := testConfig(t)
	p := openPool(t, cfg)
	dir := create(t, p, "sb-1")
	if err := writeSynced(filepath.Join(dir, "kept"), []byte("synced")); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "xfs_io", "-x", "-c", "shutdown", cfg.Dir).CombinedOutput()
	if err != nil {
		t.Fatalf("xfs_io: %v: %s", err, out)
	}
	if err := p.Probe(t.Context()); err == nil {
		t.Error("the probe of a dead file system succeeded")
	}
	if err := p.Close(true); err != nil {
		t.Fatal(err)
	}
	p = openPool(t, cfg)
	if got := readFile(t, filepath.Join(dir, "kept")); string(got) != "synced" {
		t.Errorf("synced file holds %q", got)
	}
	if err := p.Probe(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestLoopDeviceWithoutNodesInDev(t *testing.T) {
	cfg := testConfig(t)
	if err := openPool(t, cfg).Close(true); err != nil {
		t.Fatal(err)
	}
	nodes := &deviceNodes{dev: t.TempDir(), near: filepath.Dir(cfg.Image)}
	backing, err := os.OpenFile(cfg.Image, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer backing.Close()
	loop, path, err := attach(backing, nodes)
	if err != nil {
		t.Fatal(err)
	}
	if err := mountXFS(path, cfg.Dir, cfg.Image); err != nil {
		t.Error(err)
	}
	if err := errors.Join(loop.Close(), nodes.close(), unix.Unmount(cfg.Dir, 0)); err != nil {
		t.Error(err)
	}
	if pathExists(nodes.dir) {
		t.Error("private device nodes are left")
	}
}

func TestUsageFollowsWhatIsWritten(t *testing.T) {
	p := newPool(t)
	total, before, err := p.Usage()
	if err != nil || total <= 0 || total > minImageBytes || before < 0 || before > total {
		t.Fatalf("Usage = %d, %d, %v", total, before, err)
	}
	if err := writeSynced(filepath.Join(p.ScratchDir(), "x"), make([]byte, 16<<20)); err != nil {
		t.Fatal(err)
	}
	if _, after, err := p.Usage(); err != nil || after-before < 15<<20 {
		t.Errorf("used %d then %d, %v; want 16 MiB more", before, after, err)
	}
}

func TestCheckListsWhatDoesNotBelong(t *testing.T) {
	p := newPool(t)
	create(t, p, "sb-known")
	stray := create(t, p, "sb-stray")
	temp := filepath.Join(p.SandboxesDir(), "sb-known", ".manifest.json.tmp-123")
	writeFile(t, temp, nil)
	writeFile(t, filepath.Join(p.SandboxesDir(), "sb-known", "layer"), nil)
	scratch := filepath.Join(p.ScratchDir(), "build")
	writeFile(t, scratch, nil)
	odd := filepath.Join(p.Dir(), "odd")
	writeFile(t, odd, nil)
	if err := os.Mkdir(filepath.Join(p.TemplatesDir(), "tpl-1"), 0o700); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(p.TemplatesDir(), "tpl-1", "link")
	if err := os.Symlink("/", link); err != nil {
		t.Fatal(err)
	}
	got, err := p.Check(t.Context(), Known{Owners: []string{"sb-known", "sb-gone"}, Templates: []string{"tpl-1"}})
	if err != nil {
		t.Fatal(err)
	}
	want := []Finding{
		{odd, "is not part of a pool"},
		{temp, "is a file that was not written to its end"},
		{stray, "belongs to no sandbox"},
		{scratch, "was left in scratch"},
		{link, "is no regular file"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("findings (-want +got):\n%s", diff)
	}
}
