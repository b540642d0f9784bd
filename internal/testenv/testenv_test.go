package testenv

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// recorder stands in for a test: it keeps what is reported and runs the cleanups on
// demand.
type recorder struct {
	testing.TB
	name     string
	errors   []string
	cleanups []func()
}

func (r *recorder) Name() string      { return r.name }
func (r *recorder) Helper()           {}
func (r *recorder) Cleanup(f func())  { r.cleanups = append(r.cleanups, f) }
func (r *recorder) Error(args ...any) { r.errors = append(r.errors, fmt.Sprint(args...)) }

func (r *recorder) Errorf(f string, args ...any) {
	r.errors = append(r.errors, fmt.Sprintf(f, args...))
}
func (r *recorder) report() string { return strings.Join(r.errors, "\n") }
func (r *recorder) end() {
	for i := len(r.cleanups) - 1; i >= 0; i-- {
		r.cleanups[i]()
	}
}

func TestTempRootIsShortOpenToPassAndGoneAfterwards(t *testing.T) {
	r := &recorder{TB: t, name: t.Name() + "/inner"}
	dir := TempRoot(r)
	if len(dir) > 20 {
		t.Errorf("%s has %d bytes", dir, len(dir))
	}
	if st, err := os.Stat(dir); err != nil || st.Mode().Perm() != 0o711 {
		t.Errorf("mode %v, error %v", st.Mode(), err)
	}
	if err := os.WriteFile(filepath.Join(dir, "f"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r.end()
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("still there: %v", err)
	}
	if len(r.errors) > 0 {
		t.Errorf("reports %q", r.errors)
	}
}

func TestTempRootReportsAndTakesAwayAMount(t *testing.T) {
	RequireRoot(t)
	r := &recorder{TB: t, name: t.Name()}
	dir := TempRoot(r)
	at := filepath.Join(dir, "with space")
	if err := os.Mkdir(at, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("none", at, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	r.end()
	if !strings.Contains(r.report(), "mount "+at) {
		t.Errorf("reports %q", r.errors)
	}
	if left := mountsBelow(dir); len(left) > 0 {
		t.Errorf("still mounted: %q", left)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("still there: %v", err)
	}
}

func TestLeaksReportsAProcessThatNamesTheRoot(t *testing.T) {
	r := &recorder{TB: t, name: t.Name()}
	dir := makeRoot(r)
	defer os.RemoveAll(dir)
	before := processes(rootPrefix(r))

	// A child that leaves the family, as a shim does.
	cmd := exec.Command("sh", "-c", "exec sleep 60")
	cmd.Dir = dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	left := strings.Join(leaked(rootPrefix(r), before), "\n")
	if want := fmt.Sprintf("process %d ", cmd.Process.Pid); !strings.Contains(left, want) {
		t.Errorf("%q does not report %s", left, want)
	}
	if names(cmd.Process.Pid, dir) == "" {
		t.Errorf("process %d is not known by its root", cmd.Process.Pid)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if left := leaked(rootPrefix(r), before); len(left) > 0 {
		t.Errorf("reports %q when all is gone", left)
	}
}

func TestLeaksDoesNotCountOtherTests(t *testing.T) {
	r := &recorder{TB: t, name: t.Name()}
	other := t.TempDir()
	cmd := exec.Command("sleep", "60")
	cmd.Dir = other
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	Leaks(r) // the child is there already
	r.end()
	if len(r.errors) > 0 {
		t.Errorf("reports %q", r.errors)
	}
}

func TestEventuallyReportsTheLastError(t *testing.T) {
	n := 0
	err := poll(time.Minute, func() error {
		if n++; n < 3 {
			return errors.New("not yet")
		}
		return nil
	})
	if err != nil || n != 3 {
		t.Errorf("%d calls, error %v", n, err)
	}
	want := errors.New("never")
	if err := poll(10*time.Millisecond, func() error { return want }); !errors.Is(err, want) {
		t.Errorf("error %v", err)
	}
}

func TestPublishNeverWritesIntoARunningProgram(t *testing.T) {
	dir := t.TempDir()
	fresh, target := filepath.Join(dir, "fresh"), filepath.Join(dir, "target")
	put := func(text string) os.FileInfo {
		t.Helper()
		if err := os.WriteFile(fresh, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := publish(fresh, target); err != nil {
			t.Fatal(err)
		}
		st, err := os.Stat(target)
		if err != nil {
			t.Fatal(err)
		}
		return st
	}
	first, same, other := put("a"), put("a"), put("b")
	if !os.SameFile(first, same) {
		t.Error("the same content replaces the file")
	}
	if os.SameFile(same, other) {
		t.Error("other content is written into the old file")
	}
}
