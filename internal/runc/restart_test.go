package runc

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
)

func TestDaemonRestartKeepsRunningSlotsAndNoOthers(t *testing.T) {
	n := newNode(t, 2)
	n.Start(t.Context())
	kept := n.claim("sb-kept")
	n.probe("sb-kept", "wait")
	forgotten := n.claim("sb-forgotten")
	n.probe("sb-forgotten", "wait")
	waitFull(t, n)
	n.die()

	n.start()
	list, err := n.List(t.Context())
	if err != nil || len(list) != 2 {
		t.Fatalf("slots after the restart: %+v, %v", list, err)
	}
	if err := n.Adopt(t.Context(), []string{"sb-kept"}); err != nil {
		t.Fatal(err)
	}
	list, err = n.List(t.Context())
	if err != nil || len(list) != 1 || list[0] != kept {
		t.Fatalf("slots after Adopt: %+v, %v; want %+v", list, err, kept)
	}
	if !alive(kept.Process) || alive(forgotten.Process) {
		t.Errorf("kept alive: %v, forgotten alive: %v", alive(kept.Process), alive(forgotten.Process))
	}
	containers, err := n.client.ContainerService().List(t.Context())
	if err != nil || len(containers) != 1 {
		t.Errorf("%d containers after Adopt, %v", len(containers), err)
	}
	if in := n.claim("sb-new"); in.UID == kept.UID {
		t.Errorf("user ID %d is used twice", in.UID)
	}

	if err := unix.Kill(kept.Process.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	exit, err := n.Wait(t.Context(), "sb-kept")
	if err != nil || exit.Code != 137 {
		t.Errorf("exit %+v, %v", exit, err)
	}
	for _, owner := range []string{"sb-kept", "sb-new"} {
		if err := n.Destroy(t.Context(), owner); err != nil {
			t.Error(err)
		}
	}
	assertEmpty(t, n)
}

func TestProcessThatDiedWhileTheDaemonWasDownIsReported(t *testing.T) {
	n := newNode(t, 0)
	killed := n.claim("sb-killed")
	n.probe("sb-killed", "wait")
	n.claim("sb-never-launched")
	n.die()
	if err := killProcess(killed.Process); err != nil {
		t.Fatal(err)
	}
	if err := waitGone(t.Context(), killed.Process); err != nil {
		t.Fatal(err)
	}
	awaitExitFile(t, n, killed.Slot)

	n.start()
	if len(n.cfg.Exits) != 1 || n.cfg.Exits[0].Owner != killed.Slot || n.cfg.Exits[0].Code != 137 {
		t.Errorf("exits that were missed: %+v", n.cfg.Exits)
	}
	if err := n.Adopt(t.Context(), []string{"sb-killed", "sb-never-launched"}); err != nil {
		t.Fatal(err)
	}
	exit, err := n.Wait(t.Context(), "sb-killed")
	if err != nil || exit.Code != 137 || exit.Time.IsZero() {
		t.Errorf("exit %+v, %v", exit, err)
	}
	n.probe("sb-never-launched", "wait") // its launcher waited on
	for _, owner := range []string{"sb-killed", "sb-never-launched"} {
		if err := n.Destroy(t.Context(), owner); err != nil {
			t.Error(err)
		}
	}
	if _, err := n.Wait(t.Context(), "sb-killed"); !cube.IsNotFound(err) {
		t.Errorf("wait after destroy: %v", err)
	}
	assertEmpty(t, n)
}

func TestCloseLeavesClaimedSlotsAlone(t *testing.T) {
	n := newNode(t, 1)
	n.Start(t.Context())
	in := n.claim("sb-1")
	n.probe("sb-1", "wait")
	waitFull(t, n)
	n.stop()
	if !alive(in.Process) {
		t.Error("Close killed a claimed slot")
	}
	if _, err := n.Claim(t.Context(), "sb-2", limits()); cube.CodeOf(err) != cube.CodeUnavailable {
		t.Errorf("claim after Close: %v", err)
	}
	n.start()
	containers, err := n.client.ContainerService().List(t.Context())
	if err != nil || len(containers) != 1 {
		t.Errorf("%d containers, %v", len(containers), err)
	}
	if err := n.Adopt(t.Context(), []string{"sb-1"}); err != nil {
		t.Fatal(err)
	}
}

// A runtime that is killed before it has written its state leaves a cgroup that only its
// parent knows of.
func TestAdoptRemovesCgroupsOfNoSlot(t *testing.T) {
	n := newNode(t, 0)
	kept := n.claim("kept")
	dirs, err := cgroupDirs(n.cfg.CgroupParent)
	if err != nil {
		t.Fatal(err)
	}
	var strays []string
	for _, dir := range dirs {
		if !hasChildren(dir) {
			continue // a hierarchy that slots do not use
		}
		stray := filepath.Join(dir, "vmm-nobodys")
		if err := os.Mkdir(stray, 0o755); err != nil {
			t.Fatal(err)
		}
		strays = append(strays, stray)
	}
	if len(strays) == 0 {
		t.Fatal("no slot has a cgroup")
	}
	if err := n.Adopt(t.Context(), []string{"kept"}); err != nil {
		t.Fatal(err)
	}
	for _, stray := range strays {
		if _, err := os.Stat(stray); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left: %v", stray, err)
		}
		if _, err := os.Stat(filepath.Join(filepath.Dir(stray), kept.Slot)); err != nil {
			t.Errorf("the cgroup of a claimed slot: %v", err)
		}
	}
}
