package runc

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/testenv"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

func TestProgramInASlotIsJailed(t *testing.T) {
	n := newNode(t, 0)
	in := n.claim("sb-1")
	r := n.probe("sb-1", "wait", "x y")

	if want := []string{"/proc/self/fd/3", "wait", "x y"}; !slices.Equal(r.Args, want) || !slices.Equal(r.Env, []string{"A=1"}) || r.Fd4 != "text of sb-1" {
		t.Errorf("args %q, env %q, descriptor 4 %q", r.Args, r.Env, r.Fd4)
	}
	for key, want := range map[string]string{
		"CapInh": "0000000000000000", "CapPrm": "0000000000000000", "CapEff": "0000000000000000",
		"CapBnd": "0000000000000000", "CapAmb": "0000000000000000", "NoNewPrivs": "1", "Seccomp": "2",
	} {
		if r.Status[key] != want {
			t.Errorf("%s is %q, want %q", key, r.Status[key], want)
		}
	}
	if r.PID != 1 || r.UID != in.UID || in.UID < defaultUIDBase {
		t.Errorf("PID %d, UID %d (instance %+v)", r.PID, r.UID, in)
	}
	if groups := r.Status["Groups"]; groups != "" && groups != strconv.Itoa(in.UID) {
		t.Errorf("groups %q", groups)
	}
	if !slices.Equal(r.Interfaces, []string{"lo"}) {
		t.Errorf("interfaces %q", r.Interfaces)
	}
	if want := []string{"bin", "dev", "launcher", "lib", "lib64", "proc", "run", "tmp", "usr"}; !slices.Equal(r.Root, want) {
		t.Errorf("root holds %q", r.Root)
	}
	if r.CoreLimit != 0 || r.CoreFilter != "00000000" || r.FileLimit > vmmFiles {
		t.Errorf("core limit %d, core filter %s, file limit %d", r.CoreLimit, r.CoreFilter, r.FileLimit)
	}
	allowed := []string{"create in /run/cube", "socket unix", "memfd"}
	for attempt, result := range r.Attempts {
		if (result == "") != slices.Contains(allowed, attempt) {
			t.Errorf("%s: %q", attempt, result)
		}
	}
	if own, jailed := namespaceOf(t, os.Getpid()), namespaceOf(t, in.Process.PID); own == jailed {
		t.Error("the slot shares the host's network namespace")
	}
}

func namespaceOf(t *testing.T, pid int) string {
	t.Helper()
	link, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		t.Fatal(err)
	}
	return link
}

func TestLimitsHoldAfterTheClaim(t *testing.T) {
	n := newNode(t, 0)
	in := n.claim("sb-1")
	for file, want := range map[string]string{
		"memory/memory.limit_in_bytes": strconv.FormatInt(limits().MemoryBytes, 10),
		"cpu/cpu.cfs_quota_us":         "100000", "cpu/cpu.cfs_period_us": "100000",
		"pids/pids.max": strconv.Itoa(limits().PIDs),
	} {
		controller, name, _ := strings.Cut(file, "/")
		if got := cgroupValue(t, n, controller, name, in.Slot); got != want {
			t.Errorf("%s is %s, want %s", file, got, want)
		}
	}
	n.probe("sb-1", "eat")
	exit, err := n.Wait(t.Context(), "sb-1")
	if err != nil || exit.Code != 137 {
		t.Fatalf("got %+v, %v", exit, err)
	}
}

// cgroupValue reads a file of the slot's cgroup under its version 1 name.
func cgroupValue(t *testing.T, n *node, controller, name, slot string) string {
	t.Helper()
	path := filepath.Join(cgroupRoot, controller, n.cfg.CgroupParent, slot, name)
	if _, err := os.Stat(filepath.Join(cgroupRoot, "cgroup.controllers")); err == nil {
		v2 := map[string]string{"memory.limit_in_bytes": "memory.max", "cpu.cfs_quota_us": "cpu.max", "cpu.cfs_period_us": "cpu.max", "pids.max": "pids.max"}
		path = filepath.Join(cgroupRoot, n.cfg.CgroupParent, slot, v2[name])
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	value := strings.TrimSpace(string(data))
	switch quota, period, both := strings.Cut(value, " "); {
	case both && name == "cpu.cfs_period_us":
		return period
	case both:
		return quota
	}
	return value
}

func TestExitCodeIsReported(t *testing.T) {
	n := newNode(t, 0)
	n.claim("sb-1")
	n.probe("sb-1", "exit")
	exit, err := n.Wait(t.Context(), "sb-1")
	if err != nil || exit.Code != 7 || exit.Owner != "sb-1" || time.Since(exit.Time) > time.Minute {
		t.Fatalf("got %+v, %v", exit, err)
	}
	list, err := n.List(t.Context())
	if err != nil || len(list) != 1 || list[0].Process != (vmm.Process{}) {
		t.Fatalf("a dead process must be listed without identity: %+v, %v", list, err)
	}
}

func TestManyClaimsOnAnEmptyPoolAllSucceed(t *testing.T) {
	n := newNode(t, 0)
	const count = 20
	var wg sync.WaitGroup
	instances := make([]vmm.Instance, count)
	errs := make([]error, count)
	for i := range count {
		wg.Go(func() { instances[i], errs[i] = n.Claim(t.Context(), "sb-"+strconv.Itoa(i), limits()) })
	}
	wg.Wait()
	uids, pids := map[int]bool{}, map[int]bool{}
	for i := range count {
		if errs[i] != nil {
			t.Error(errs[i])
			continue
		}
		uids[instances[i].UID], pids[instances[i].Process.PID] = true, true
	}
	if len(uids) != count || len(pids) != count {
		t.Errorf("%d user IDs, %d processes", len(uids), len(pids))
	}
	for i := range count {
		wg.Go(func() {
			if err := n.Destroy(t.Context(), "sb-"+strconv.Itoa(i)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	assertEmpty(t, n)
}

// assertEmpty checks that no trace of a slot is left.
func assertEmpty(t *testing.T, n *node) {
	t.Helper()
	containers, err := n.client.ContainerService().List(t.Context())
	if err != nil || len(containers) != 0 {
		t.Errorf("%d containers left, %v", len(containers), err)
	}
	for _, dir := range []string{n.cfg.RunDir + "/slots", n.cfg.RuncRoot + "/test"} {
		entries, err := os.ReadDir(dir)
		if err != nil || len(entries) != 0 {
			t.Errorf("left in %s: %v, %v", dir, entries, err)
		}
	}
	n.uids.mu.Lock()
	defer n.uids.mu.Unlock()
	if len(n.uids.used) != 0 {
		t.Errorf("user IDs still taken: %v", n.uids.used)
	}
}

func TestClaimsAndDestroysMixedLoseNoSlot(t *testing.T) {
	n := newNode(t, 2)
	n.Start(t.Context())
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 6 {
				owner := fmt.Sprintf("sb-%d-%d", w, i)
				if _, err := n.Claim(t.Context(), owner, limits()); err != nil {
					t.Error(err)
					continue
				}
				if err := n.Destroy(t.Context(), owner); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	waitFull(t, n)
}

func waitFull(t *testing.T, n *node) {
	t.Helper()
	testenv.Eventually(t, time.Minute, func() error {
		if got := n.Waiting(); got != n.target {
			return fmt.Errorf("%d slots wait, want %d", got, n.target)
		}
		return nil
	})
}

func TestDestroyMayBeRepeated(t *testing.T) {
	n := newNode(t, 0)
	if err := n.Destroy(t.Context(), "nobody"); err != nil {
		t.Error(err)
	}
	in := n.claim("sb-1")
	n.probe("sb-1", "wait")
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if err := n.Destroy(t.Context(), "sb-1"); err != nil {
				t.Error(err)
			}
			if alive(in.Process) {
				t.Error("Destroy returned before the process was gone")
			}
		})
	}
	wg.Wait()
	if err := n.Destroy(t.Context(), "sb-1"); err != nil {
		t.Error(err)
	}
	assertEmpty(t, n)
}

func TestAnOwnerHasOneSlot(t *testing.T) {
	n := newNode(t, 0)
	n.claim("sb-1")
	if _, err := n.Claim(t.Context(), "sb-1", limits()); cube.CodeOf(err) != cube.CodeAlreadyExists {
		t.Errorf("got %v", err)
	}
	n.probe("sb-1", "wait")
	err := n.Launch(t.Context(), "sb-1", []string{"/bin/true"}, nil, nil)
	if cube.CodeOf(err) != cube.CodeFailedPrecondition {
		t.Errorf("second launch: %v", err)
	}
	if err := n.Launch(t.Context(), "sb-2", []string{"/bin/true"}, nil, nil); !cube.IsNotFound(err) {
		t.Errorf("launch without a slot: %v", err)
	}
	if _, err := n.Wait(t.Context(), "sb-2"); !cube.IsNotFound(err) {
		t.Errorf("wait without a slot: %v", err)
	}
	if _, err := n.Claim(t.Context(), "../x", limits()); cube.CodeOf(err) != cube.CodeInvalid {
		t.Errorf("bad owner: %v", err)
	}
	if _, err := n.Claim(t.Context(), "sb-3", vmm.Limits{}); cube.CodeOf(err) != cube.CodeInvalid {
		t.Errorf("no limits: %v", err)
	}
}

func TestWaitNoticesTheShimsDeath(t *testing.T) {
	n := newNode(t, 0)
	in := n.claim("sb-1")
	n.probe("sb-1", "wait")
	result := make(chan error, 1)
	go func() {
		exit, err := n.Wait(t.Context(), "sb-1")
		if err == nil && (exit.Code != codeShimDied && exit.Code != codeKilled || alive(in.Process)) {
			err = fmt.Errorf("%+v, alive %v", exit, alive(in.Process))
		}
		result <- err
	}()
	if err := unix.Kill(parentOf(t, in.Process.PID), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-result:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("Wait does not return")
	}
	if err := n.Destroy(t.Context(), "sb-1"); err != nil {
		t.Error(err)
	}
	assertEmpty(t, n)
	n.claim("sb-2") // the node still makes slots
}

func parentOf(t *testing.T, pid int) int {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(data), "PPid:")
	line, _, _ := strings.Cut(rest, "\n")
	ppid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil || ppid <= 1 {
		t.Fatalf("parent of %d is %q", pid, line)
	}
	return ppid
}

func TestADeadWaitingSlotIsNeverClaimed(t *testing.T) {
	n := newNode(t, 1)
	n.Start(t.Context())
	waitFull(t, n)
	n.mu.Lock()
	victim := n.waiting[0]
	n.mu.Unlock()
	if err := killProcess(victim.process); err != nil {
		t.Fatal(err)
	}
	if err := waitGone(t.Context(), victim.process); err != nil {
		t.Fatal(err)
	}
	if in := n.claim("sb-1"); in.Slot == victim.name || !alive(in.Process) {
		t.Errorf("got %+v", in)
	}
}

func TestUserIDsRunOut(t *testing.T) {
	n := newNode(t, 0)
	n.uids.count = 1
	n.claim("sb-1")
	if _, err := n.Claim(t.Context(), "sb-2", limits()); cube.CodeOf(err) != cube.CodeResourceExhausted {
		t.Errorf("got %v", err)
	}
	if err := n.Destroy(t.Context(), "sb-1"); err != nil {
		t.Fatal(err)
	}
	n.claim("sb-2")
}

func TestKVMIsGivenOnlyWhenAsked(t *testing.T) {
	n := newNode(t, 0)
	n.jail.kvm = true
	n.claim("sb-1")
	if r := n.probe("sb-1", "wait"); r.Attempts["stat /dev/kvm"] != "" || r.Attempts["stat /dev/net/tun"] == "" {
		t.Errorf("kvm: %q, tun: %q", r.Attempts["stat /dev/kvm"], r.Attempts["stat /dev/net/tun"])
	}
}

func TestACancelledClaimLeavesNothing(t *testing.T) {
	n := newNode(t, 0)
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*30*time.Millisecond)
			defer cancel()
			owner := "sb-" + strconv.Itoa(i)
			_, err := n.Claim(ctx, owner, limits())
			if err == nil {
				err = n.Destroy(t.Context(), owner)
			} else if cube.CodeOf(err) == cube.CodeDeadlineExceeded {
				err = nil
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	assertEmpty(t, n)
}
