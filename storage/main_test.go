package storage

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cubelet/internal/testenv"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// testConfig is a pool in an image of the least size below a new root.
func testConfig(t *testing.T) Config {
	t.Helper()
	testenv.RequireRoot(t)
	root := testenv.TempRoot(t)
	return Config{
		Dir: filepath.Join(root, "pool"), Image: filepath.Join(root, "pool.img"), SizeBytes: minImageBytes,
		Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
}

// openPool opens the pool and unmounts it when the test ends.
func openPool(t *testing.T, cfg Config) *Pool {
	t.Helper()
	p, err := OpenPool(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(true); err != nil && !errors.Is(err, os.ErrClosed) && !errors.Is(err, unix.EINVAL) {
			t.Error(err)
		}
	})
	return p
}

func newPool(t *testing.T) *Pool {
	t.Helper()
	return openPool(t, testConfig(t))
}

// plainPool opens a pool on a file system without reflinks.
func plainPool(t *testing.T) *Pool {
	t.Helper()
	dir := filepath.Join(tmpfs(t, "64m"), "pool")
	return openPool(t, Config{Dir: dir, AllowNoReflink: true})
}

func tmpfs(t *testing.T, size string) string {
	t.Helper()
	testenv.RequireRoot(t)
	root := testenv.TempRoot(t)
	if err := unix.Mount("tmpfs", root, "tmpfs", 0, "size="+size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(root, 0); err != nil {
			t.Errorf("unmount %s: %v", root, err)
		}
	})
	return root
}

func writeFile(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

func readFile(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// fill writes to path until the pool is full.
func fill(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, bytes.NewReader(make([]byte, 1<<30)))
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

func create(t *testing.T, p *Pool, owner string) string {
	t.Helper()
	dir, err := p.Create(context.Background(), owner)
	if err != nil {
		t.Fatal(err)
	}
	return dir
}
