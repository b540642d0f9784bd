package hostmount

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cubelet/internal/testenv"
)

func TestMountsOutliveTheDaemonAndStayFromTheHost(t *testing.T) {
	testenv.Leaks(t)
	root, dir := testRoot(t)
	at := mkdir(t, filepath.Join(root, "pool"))
	host, err := ownNamespace()
	if err != nil {
		t.Fatal(err)
	}
	first := startDaemon(t, daemonOptions{Dir: dir})
	if !first.Inside || first.Error != "" || first.Namespace == host {
		t.Fatalf("first daemon: %+v, the host is %s", first.daemonState, host)
	}
	if got := first.do("mount %s", at); got != "ok" {
		t.Fatal(got)
	}
	first.kill()
	for range 2 {
		next := startDaemon(t, daemonOptions{Dir: dir})
		if next.Namespace != first.Namespace {
			t.Errorf("the next daemon is in %s, the first one was in %s", next.Namespace, first.Namespace)
		}
		if got := next.do("exists %s/inside", at); got != "true" {
			t.Errorf("the first daemon's mount is gone: %s", got)
		}
		next.kill()
	}
	if _, err := os.Lstat(filepath.Join(at, "inside")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the host sees the daemon's mount: %v", err)
	}
}

func TestProcessStaysTheSame(t *testing.T) {
	_, dir := testRoot(t)
	cwd := t.TempDir()
	args := []string{"serve", "--flag=a b", ""}
	for _, state := range []string{"new", "existing"} {
		d := startDaemonIn(t, daemonOptions{Dir: dir}, cwd, args...)
		want := daemonState{PID: d.cmd.Process.Pid, Namespace: d.Namespace, Inside: true, Args: args, Dir: cwd, Env: "kept"}
		if diff := cmp.Diff(want, d.daemonState); diff != "" {
			t.Errorf("%s namespace (-want +got):\n%s", state, diff)
		}
		d.kill()
	}
}

func TestLaterMountsOfTheHostAppearInside(t *testing.T) {
	root, dir := testRoot(t)
	at := mkdir(t, filepath.Join(root, "usb"))
	d := startDaemon(t, daemonOptions{Dir: dir})
	if err := unix.Mount("tmpfs", at, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(at, "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := d.do("exists %s/file", at); got != "true" {
		t.Errorf("the host's later mount is visible inside: %s", got)
	}
	if err := unix.Unmount(at, 0); err != nil {
		t.Errorf("the daemon keeps the host from unmounting: %v", err)
	}
	if got := d.do("exists %s/file", at); got != "false" {
		t.Errorf("a mount that the host took away is visible inside: %s", got)
	}
}

func TestWhateverLiesInThePlaceOfThePinIsReplaced(t *testing.T) {
	for _, tc := range []struct {
		name string
		make func(t *testing.T, dir string)
	}{
		{"the plain file that a reboot leaves", func(t *testing.T, dir string) {
			write(t, filepath.Join(dir, pinName), "")
			write(t, filepath.Join(dir, idName), "00000000-0000-0000-0000-000000000000 mnt:[4026531841]\n")
		}},
		{"junk", func(t *testing.T, dir string) {
			write(t, filepath.Join(dir, pinName), "junk")
			write(t, filepath.Join(dir, idName), "junk")
		}},
		{"a directory", func(t *testing.T, dir string) { mkdir(t, filepath.Join(dir, pinName)) }},
		{"a link", func(t *testing.T, dir string) {
			if err := os.Symlink("/proc/1/ns/mnt", filepath.Join(dir, pinName)); err != nil {
				t.Fatal(err)
			}
		}},
		{"a pipe that nobody writes to", func(t *testing.T, dir string) {
			if err := unix.Mkfifo(filepath.Join(dir, pinName), 0o600); err != nil {
				t.Fatal(err)
			}
		}},
		{"a network namespace", func(t *testing.T, dir string) {
			write(t, filepath.Join(dir, pinName), "")
			if err := unix.Mount("/proc/self/ns/net", filepath.Join(dir, pinName), "", unix.MS_BIND, ""); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, dir := testRoot(t)
			if err := os.MkdirAll(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			tc.make(t, dir)
			first := startDaemon(t, daemonOptions{Dir: dir})
			if !first.Inside || first.Error != "" {
				t.Fatalf("first daemon: %+v", first.daemonState)
			}
			first.kill()
			second := startDaemon(t, daemonOptions{Dir: dir})
			if second.Namespace != first.Namespace {
				t.Errorf("the namespace was not kept: %s, then %s", first.Namespace, second.Namespace)
			}
		})
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestBrokenStepsNeverBlock breaks each step, by a failure and by one that never ends. The
// daemon must run all the same, in a namespace of its own unless that is what is broken.
func TestBrokenStepsNeverBlock(t *testing.T) {
	host, err := ownNamespace()
	if err != nil {
		t.Fatal(err)
	}
	for _, steps := range [][]string{{"prepare"}, {"open"}, {"create"}, {"pin"}, {"create", "unshare"}} {
		for _, how := range []string{"fail", "hang"} {
			t.Run(how+" "+strings.Join(steps, " "), func(t *testing.T) {
				_, dir := testRoot(t)
				o := daemonOptions{Dir: dir, Deadline: 300 * time.Millisecond, Fail: steps}
				if how == "hang" {
					o.Fail, o.Hang = nil, steps
				}
				d := startDaemon(t, o)
				alone := len(steps) == 1
				if alone != (d.Namespace != host) || alone != d.Inside || alone != (d.Error == "") {
					t.Errorf("daemon: %+v, the host is %s", d.daemonState, host)
				}
				d.kill()
				healthy := startDaemon(t, daemonOptions{Dir: dir})
				if !healthy.Inside || healthy.Error != "" {
					t.Errorf("the next daemon, with nothing broken: %+v", healthy.daemonState)
				}
			})
		}
	}
}

func TestBrokenEntryIntoAPinnedNamespaceNeverBlocks(t *testing.T) {
	_, dir := testRoot(t)
	first := startDaemon(t, daemonOptions{Dir: dir})
	first.kill()
	d := startDaemon(t, daemonOptions{Dir: dir, Deadline: 300 * time.Millisecond, Hang: []string{"enter"}})
	if !d.Inside || d.Error != "" || d.Namespace == first.Namespace {
		t.Errorf("daemon: %+v", d.daemonState)
	}
	d.kill()
	if again := startDaemon(t, daemonOptions{Dir: dir}); again.Namespace != first.Namespace {
		t.Errorf("the pinned namespace was given up: %s, then %s", first.Namespace, again.Namespace)
	}
}

func TestTwoDaemonsAtOnceShareOneNamespace(t *testing.T) {
	_, dir := testRoot(t)
	started := make(chan *daemon, 4)
	for range cap(started) {
		go func() { started <- startDaemon(t, daemonOptions{Dir: dir}) }()
	}
	seen := map[string]bool{}
	for range cap(started) {
		seen[(<-started).Namespace] = true
	}
	if len(seen) != 1 {
		t.Errorf("namespaces: %v", seen)
	}
}

// TestReleaseEndsTheNamespace proves it by what the namespace holds: its mount keeps the
// file system below it busy until it is gone.
func TestReleaseEndsTheNamespace(t *testing.T) {
	testenv.Leaks(t)
	root, dir := testRoot(t)
	if err := Release(dir); err != nil {
		t.Errorf("release of nothing: %v", err)
	}
	d := startDaemon(t, daemonOptions{Dir: dir})
	d.kill()
	if err := Release(dir); err != nil {
		t.Fatal(err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(mounts, []byte(root)) {
		t.Errorf("mounts are left:\n%s", mounts)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("left in %s: %v, %v", dir, entries, err)
	}
	if next := startDaemon(t, daemonOptions{Dir: dir}); next.Error != "" || !next.Inside {
		t.Errorf("daemon after the release: %+v", next.daemonState)
	}
}
