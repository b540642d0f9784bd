package main

import (
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cubesandbox/cubelet/internal/daemon"
	"github.com/cubesandbox/cubelet/internal/hostmount"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

// mntRootEnv makes the test below the daemon of that root.
const mntRootEnv = "CUBE_TEST_MNT_ROOT"

// TestDaemonGoesIntoItsMountNamespaceOnce starts two daemons, one after the other: both
// must end up in the same namespace, which is not the host's, and find nothing left to do.
func TestDaemonGoesIntoItsMountNamespaceOnce(t *testing.T) {
	if root := os.Getenv(mntRootEnv); root != "" {
		cfg := &daemon.Config{Root: root, Log: slog.New(slog.NewTextHandler(os.Stderr, nil))}
		if needNewMnt(cfg) {
			newCubeMnt(cfg) // starts this test anew
		}
		ns, err := os.Readlink("/proc/self/ns/mnt")
		if err != nil || needNewMnt(cfg) {
			t.Fatalf("in %s: not inside, %v", ns, err)
		}
		if err := os.WriteFile(filepath.Join(root, "result"), []byte(ns), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	testenv.RequireRoot(t)
	root := testenv.TempRoot(t)
	t.Cleanup(func() {
		if err := hostmount.Release(filepath.Join(root, "run", "mnt")); err != nil {
			t.Error(err)
		}
	})
	if !needNewMnt(&daemon.Config{Root: root}) {
		t.Error("a new node has its mount namespace already")
	}
	var seen []string
	for range 2 {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
		cmd.Env = append(os.Environ(), mntRootEnv+"="+root)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("daemon: %v\n%s", err, out)
		}
		ns, err := os.ReadFile(filepath.Join(root, "result"))
		if err != nil {
			t.Fatal(err)
		}
		seen = append(seen, string(ns))
	}
	host, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		t.Fatal(err)
	}
	if seen[0] != seen[1] || seen[0] == host {
		t.Errorf("daemons ran in %s, the host is %s", strings.Join(seen, " and "), host)
	}
}
