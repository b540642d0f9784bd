package testenv

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// shimPackage is the one program that comes from a dependency: the shim must be of the
// same version as the containerd that is linked into cubelet.
const shimPackage = "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2"

// Binary builds the program called name (a directory of cmd, or
// containerd-shim-runc-v2) and returns its path in build/testbin. The build is static,
// so the result also runs as a container's init and in the guest.
func Binary(t testing.TB, name string) string {
	t.Helper()
	repo := Repo(t)
	pkg := "./cmd/" + name
	if name == filepath.Base(shimPackage) {
		pkg = shimPackage
	}
	dir := filepath.Join(repo, "build", "testbin")
	fresh := filepath.Join(dir, "new", name)
	target := filepath.Join(dir, name)
	defer lock(t, filepath.Join(dir, "lock"))()

	if err := os.MkdirAll(filepath.Dir(fresh), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("go", "build", "-trimpath", "-o", fresh, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	run(t, repo, cmd)
	if err := publish(fresh, target); err != nil {
		t.Fatalf("publish %s: %v", name, err)
	}
	return target
}

// publish makes target a copy of fresh without ever writing into a file that another
// test may be executing. fresh stays, so that the next build finds it up to date.
func publish(fresh, target string) error {
	src, err := os.ReadFile(fresh)
	if err != nil {
		return err
	}
	old, err := os.ReadFile(target)
	if err == nil && bytes.Equal(old, src) {
		return nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	tmp := target + ".tmp"
	if err := os.WriteFile(tmp, src, 0o755); err != nil {
		return err
	}
	return os.Rename(tmp, target)
}

// KernelDir returns the directory with vmlinuz, release and modules of the guest
// kernel, which it fetches when missing.
func KernelDir(t testing.TB) string {
	t.Helper()
	return artifact(t, "fetch-kernel", filepath.Join("build", "kernel"))
}

// BaseArchive returns the path of the OCI image archive of the base image (Debian with
// python3, bash, curl, git, sudo and the user "user"), which it builds when missing.
func BaseArchive(t testing.TB) string {
	t.Helper()
	return artifact(t, "build-base-image", filepath.Join("build", "images", "base.tar"))
}

// artifact runs a script of scripts/ with the path that it makes. The scripts return
// at once when there is nothing to do.
func artifact(t testing.TB, script, path string) string {
	t.Helper()
	repo := Repo(t)
	path = filepath.Join(repo, path)
	defer lock(t, path+".lock")()
	run(t, repo, exec.Command(filepath.Join(repo, "scripts", script), path))
	return path
}

// lock takes an exclusive lock on the file, against other test processes too, and
// returns the function that gives it back.
func lock(t testing.TB, path string) (unlock func()) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	for {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX)
		if !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	if err != nil {
		t.Fatalf("lock %s: %v", path, err)
	}
	return func() { _ = f.Close() }
}

func run(t testing.TB, dir string, cmd *exec.Cmd) {
	t.Helper()
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s", fmt.Sprintf("%s: %v\n%s", cmd, err, out))
	}
}
