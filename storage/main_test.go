package storage

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cubelet/internal/testenv"
)

const insideEnv = "CUBE_STORAGE_TEST_INSIDE"

// TestMain runs the tests in a mount namespace of their own, as the daemon runs. In the
// host's, every container that starts meanwhile takes a copy of our mounts and with it
// keeps a pool alive that was unmounted.
func TestMain(m *testing.M) {
	if os.Getenv(insideEnv) != "" || os.Geteuid() != 0 {
		goleak.VerifyTestMain(m)
		return
	}
	runtime.LockOSThread() // the death signal below is tied to the thread
	cmd := exec.Command(os.Args[0], os.Args[1:]...)
	cmd.Env = append(os.Environ(), insideEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		os.Exit(exit.ExitCode())
	case err != nil:
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

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

// fill takes all space of the pool with a file and returns the error that ends it.
func fill(p *Pool, path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	total, used, err := p.Usage()
	if err == nil {
		// Most of it is only reserved, which is quick; the rest is written.
		err = unix.Fallocate(int(f.Fd()), 0, 0, max(total-used-(16<<20), 1))
	}
	if err == nil {
		_, err = f.Seek(0, io.SeekEnd)
	}
	if err == nil {
		_, err = io.Copy(f, bytes.NewReader(make([]byte, 256<<20)))
	}
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
