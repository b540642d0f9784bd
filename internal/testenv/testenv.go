// Package testenv gives tests the things of the real world that they need: binaries,
// a kernel, a base image, a root directory that is gone afterwards, and a check that
// nothing was left on the machine. Nothing here skips: what is missing fails the test
// with a sentence that says how to get it.
package testenv

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// RequireRoot fails the test when it does not run as root.
func RequireRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatalf("this test changes mounts, namespaces and cgroups: run it as root (make test)")
	}
}

// Repo returns the absolute path of the directory that holds go.mod.
func Repo(t testing.TB) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatalf("find the repository: %v", err)
	}
	for d := dir; ; d = filepath.Dir(d) {
		if _, err := os.Stat(filepath.Join(d, "go.mod")); err == nil {
			return d
		}
		if d == filepath.Dir(d) {
			t.Fatalf("no go.mod above %s", dir)
		}
	}
}

// Eventually calls check until it returns nil, and fails the test with check's last
// error when that takes longer than timeout.
func Eventually(t testing.TB, timeout time.Duration, check func() error) {
	t.Helper()
	if err := poll(timeout, check); err != nil {
		t.Fatalf("still not so after %v: %v", timeout, err)
	}
}

// poll calls check with growing pauses (2 ms to 100 ms) until it succeeds or timeout
// is over; it returns check's last error.
func poll(timeout time.Duration, check func() error) error {
	deadline := time.Now().Add(timeout)
	pause := 2 * time.Millisecond
	for {
		err := check()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		<-time.After(pause)
		pause = min(2*pause, 100*time.Millisecond)
	}
}
