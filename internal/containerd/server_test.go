package containerd

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

func config(t *testing.T) Config {
	t.Helper()
	testenv.RequireRoot(t)
	testenv.Leaks(t)
	root := testenv.TempRoot(t)
	return Config{
		Root: filepath.Join(root, "containerd"), State: filepath.Join(root, "run", "c"),
		Address: filepath.Join(root, "run", "containerd.sock"), ShimSocketDir: filepath.Join(root, "run", "s"),
		LibexecDir: filepath.Dir(testenv.Binary(t, shimName)),
		Log:        slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
}

func start(t *testing.T, cfg Config) *Server {
	t.Helper()
	s, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

func TestServerStartsAgainAndAgainInOneProcess(t *testing.T) {
	cfg := config(t)
	for range 3 {
		s := start(t, cfg)
		c, err := s.Client("test")
		if err != nil {
			t.Fatal(err)
		}
		v, err := c.Version(t.Context())
		if err != nil || v.Version == "" {
			t.Errorf("version %+v, %v", v, err)
		}
		if c.Runtime() != cfg.shim() {
			t.Errorf("runtime %q", c.Runtime())
		}
		if _, err := c.ListImages(t.Context()); err != nil {
			t.Error(err)
		}
		if _, err := c.SnapshotService("overlayfs").Usage(t.Context(), "none"); err == nil || !strings.Contains(err.Error(), "not found") {
			t.Errorf("overlayfs snapshotter: %v", err)
		}
		if _, err := c.LeasesService().List(t.Context()); err != nil {
			t.Error(err)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		s.Stop()
	}
}

func TestSecondDaemonOnOneRootIsRefused(t *testing.T) {
	cfg := config(t)
	start(t, cfg)
	_, err := Start(t.Context(), cfg)
	if cube.CodeOf(err) != cube.CodeFailedPrecondition || !strings.Contains(err.Error(), "another daemon") {
		t.Fatalf("got %v", err)
	}
}

func TestConfigIsChecked(t *testing.T) {
	good := config(t)
	for name, change := range map[string]func(*Config){
		"relative root":   func(c *Config) { c.Root = "x" },
		"long socket dir": func(c *Config) { c.ShimSocketDir = "/" + strings.Repeat("x", maxSocketDir) },
		"no shim":         func(c *Config) { c.LibexecDir = t.TempDir() },
	} {
		cfg := good
		change(&cfg)
		if s, err := Start(t.Context(), cfg); err == nil {
			s.Stop()
			t.Errorf("%s: started", name)
		} else if code := cube.CodeOf(err); code != cube.CodeInvalid && code != cube.CodeFailedPrecondition {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestStateOfAnEarlierBootIsEmptied(t *testing.T) {
	state := filepath.Join(t.TempDir(), "s")
	if err := resetStateOfEarlierBoot(state); err != nil {
		t.Fatal(err)
	}
	task := filepath.Join(state, "io.containerd.runtime.v2.task", "ns", "id")
	if err := os.MkdirAll(task, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := resetStateOfEarlierBoot(state); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(task); err != nil {
		t.Errorf("state of this boot is gone: %v", err)
	}
	if err := os.WriteFile(filepath.Join(state, bootIDFile), []byte("another"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := resetStateOfEarlierBoot(state); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(state)
	if err != nil || len(entries) != 1 || entries[0].Name() != bootIDFile {
		t.Errorf("state after a boot: %v, %v", entries, err)
	}
}

func TestExitsOfTasksAreRead(t *testing.T) {
	state := t.TempDir()
	for id, text := range map[string]string{
		"good":  `{"Timestamp":"2026-01-02T03:04:05.6Z","Pid":17,"Status":137}`,
		"empty": ``, "half": `{"Pid":17}`, "wrong": `{"Timestamp":"2026-01-02T03:04:05Z","Pid":17,"Status":-1}`,
	} {
		dir := filepath.Join(state, "io.containerd.runtime.v2.task", "ns", id)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "exit.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	exits := readExits(state)
	want := time.Date(2026, 1, 2, 3, 4, 5, 6e8, time.UTC)
	if len(exits) != 1 || exits[0].Owner != "good" || exits[0].Code != 137 || !exits[0].Time.Equal(want) {
		t.Errorf("got %+v", exits)
	}
}

func TestConnect(t *testing.T) {
	cfg := config(t)
	start(t, cfg)
	c, err := Connect(t.Context(), cfg.Address, "test")
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if _, err := Connect(t.Context(), "relative.sock", "test"); cube.CodeOf(err) != cube.CodeInvalid {
		t.Errorf("relative address: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := Connect(ctx, filepath.Join(t.TempDir(), "none.sock"), "test"); cube.CodeOf(err) != cube.CodeUnavailable {
		t.Errorf("nobody there: %v", err)
	}
}

func FuzzDecodeExit(f *testing.F) {
	f.Add([]byte(`{"Timestamp":"2026-01-02T03:04:05.6Z","Pid":17,"Status":137}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		if e, err := decodeExit(data); err == nil && (e.Code < 0 || e.Time.IsZero()) {
			t.Errorf("accepted %+v", e)
		}
	})
}
