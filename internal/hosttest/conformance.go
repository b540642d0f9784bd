package hosttest

import (
	"context"
	"os"
	"slices"
	"testing"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/sandbox"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// settle is how long a real host may take to do what a suite waits for.
const settle = time.Minute

// RunDisks is what every implementation of sandbox.Disks keeps to. source is a file
// that Clone can copy; missing is a path that does not exist.
func RunDisks(t *testing.T, d sandbox.Disks, source, missing string) {
	t.Helper()
	ctx := t.Context()
	owners := func() []string {
		all, err := d.List(ctx)
		if err != nil {
			t.Fatal(err)
		}
		slices.Sort(all)
		return all
	}
	dir, err := d.Create(ctx, "conform-a")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Create(ctx, "conform-a"); cube.CodeOf(err) != cube.CodeAlreadyExists {
		t.Errorf("second create = %v; want AlreadyExists", err)
	}
	if _, err := d.Create(ctx, "conform-b"); err != nil {
		t.Fatal(err)
	}
	if got := owners(); !slices.Equal(got, []string{"conform-a", "conform-b"}) {
		t.Errorf("owners = %v", got)
	}
	if err := d.Clone(ctx, source, dir+"/layer"); err != nil {
		t.Errorf("clone: %v", err)
	}
	if err := d.Clone(ctx, source, dir+"/layer"); cube.CodeOf(err) != cube.CodeAlreadyExists {
		t.Errorf("clone onto a file = %v; want AlreadyExists", err)
	}
	if err := d.Clone(ctx, missing, dir+"/other"); !cube.IsNotFound(err) {
		t.Errorf("clone of nothing = %v; want NotFound", err)
	}
	for _, owner := range []string{"conform-a", "conform-a", "conform-b", "conform-never"} {
		if err := d.Remove(ctx, owner); err != nil {
			t.Errorf("remove %s: %v", owner, err)
		}
	}
	if got := owners(); len(got) != 0 {
		t.Errorf("owners after remove = %v", got)
	}
}

// RunNetwork is what every implementation of sandbox.Network keeps to.
func RunNetwork(t *testing.T, n sandbox.Network) {
	t.Helper()
	ctx := t.Context()
	tap, err := n.Claim(ctx, "conform-a", cube.NetworkSpec{})
	if err != nil {
		t.Fatal(err)
	}
	tap.Close()
	if tap, err := n.Claim(ctx, "conform-a", cube.NetworkSpec{}); err == nil {
		tap.Close()
		t.Error("second claim for one owner succeeded")
	}
	tap, err = n.Claim(ctx, "conform-b", cube.NetworkSpec{CIDR: "192.168.10.0/24"})
	if err != nil {
		t.Fatal(err)
	}
	tap.Close()
	all, err := n.List(ctx)
	slices.Sort(all)
	if err != nil || !slices.Equal(all, []string{"conform-a", "conform-b"}) {
		t.Errorf("owners = %v, %v", all, err)
	}
	if conn, err := n.Dial(ctx, "conform-never", 80); !cube.IsNotFound(err) {
		t.Errorf("dial of an unknown owner = %v, %v; want NotFound", conn, err)
	}
	for _, owner := range []string{"conform-a", "conform-a", "conform-b", "conform-never"} {
		if err := n.Release(ctx, owner); err != nil {
			t.Errorf("release %s: %v", owner, err)
		}
	}
	if all, err := n.List(ctx); err != nil || len(all) != 0 {
		t.Errorf("owners after release = %v, %v", all, err)
	}
}

// VMMCase is what RunVMMs needs to start a machine.
type VMMCase struct {
	VMMs    sandbox.VMMs
	Limits  vmm.Limits
	Machine vmm.Machine
	Tap     *os.File
}

// RunVMMs is what every implementation of sandbox.VMMs keeps to.
func RunVMMs(t *testing.T, c VMMCase) {
	t.Helper()
	ctx, v := t.Context(), c.VMMs
	if _, err := v.Launch(ctx, "conform-a", c.Machine, c.Tap); !cube.IsNotFound(err) {
		t.Errorf("launch without a slot = %v; want NotFound", err)
	}
	if _, err := v.Wait(ctx, "conform-a"); !cube.IsNotFound(err) {
		t.Errorf("wait for an unknown owner = %v; want NotFound", err)
	}
	if _, err := v.Claim(ctx, "conform-a", c.Limits); err != nil {
		t.Fatal(err)
	}
	if _, err := v.Claim(ctx, "conform-a", c.Limits); err == nil {
		t.Error("second claim for one owner succeeded")
	}
	inst, err := v.Launch(ctx, "conform-a", c.Machine, c.Tap)
	if err != nil {
		t.Fatal(err)
	}
	if inst.Owner != "conform-a" || inst.Process.PID == 0 || inst.Process.StartTime == 0 {
		t.Errorf("instance = %+v", inst)
	}
	all, err := v.List(ctx)
	if err != nil || len(all) != 1 || all[0].Process != inst.Process {
		t.Errorf("list = %+v, %v; want the process %+v", all, err, inst.Process)
	}
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	if _, err := v.Wait(short, "conform-a"); err == nil {
		t.Error("wait returned while the VMM runs")
	}
	cancel()
	exit := make(chan error, 1)
	go func() {
		waiting, cancel := context.WithTimeout(ctx, settle)
		defer cancel()
		_, err := v.Wait(waiting, "conform-a")
		exit <- err
	}()
	for range 2 {
		if err := v.Destroy(ctx, "conform-a"); err != nil {
			t.Errorf("destroy: %v", err)
		}
	}
	if err := <-exit; err != nil && !cube.IsNotFound(err) {
		t.Errorf("wait over a destroy = %v", err)
	}
	if all, err := v.List(ctx); err != nil || len(all) != 0 {
		t.Errorf("list after destroy = %+v, %v", all, err)
	}
}
