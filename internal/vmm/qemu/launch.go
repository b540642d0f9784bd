package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// stateCapability leaves memory that is backed by a shared file out of a device state.
const stateCapability = "x-ignore-shared"

// Launch runs m in the owner's slot and returns when its vCPUs run. A tap is given
// exactly when the machine has a MAC address; it stays the caller's. With Boot the
// memory file must not exist. After an error Destroy removes what is left.
// Codes: NotFound (no slot), Invalid, FailedPrecondition (image of another size or
// damaged), NoSpace, DeadlineExceeded, Canceled, Internal with the end of QEMU's log.
func (d *Driver) Launch(ctx context.Context, owner string, m vmm.Machine, tap *os.File) (vmm.Instance, error) {
	if err := d.checkOwner(owner); err != nil {
		return vmm.Instance{}, err
	}
	inst, err := d.instance(ctx, owner)
	if err != nil {
		return vmm.Instance{}, err
	}
	if err := checkMachine(m, tap); err != nil {
		return vmm.Instance{}, err
	}
	if err := d.start(ctx, inst, m, tap); err != nil {
		return vmm.Instance{}, fmt.Errorf("launch VMM %s: %w", owner, err)
	}
	if err := d.run(ctx, owner, m); err != nil {
		return vmm.Instance{}, d.explain(owner, err)
	}
	return inst, nil
}

// start makes the slot's launcher execve QEMU.
func (d *Driver) start(ctx context.Context, inst vmm.Instance, m vmm.Machine, tap *os.File) error {
	p := d.profile
	if m.Boot != nil && p.accel == AccelTCG {
		p.tscKHz = d.tscKHz()
	}
	set, err := d.openFiles(inst, m, tap)
	if err != nil {
		return err
	}
	// The daemon's copy of the listener must go: it would keep a client of a dead QEMU
	// waiting in its backlog.
	defer set.close()
	return d.jail.Launch(ctx, inst.Owner, args(p, inst.Owner, m), environment(), set.files)
}

// environment of QEMU. Its glib reads locale and debug settings from it; there are none.
func environment() []string { return []string{"PATH=/usr/bin:/bin", "LC_ALL=C"} }

// run brings a started QEMU to a running machine.
func (d *Driver) run(ctx context.Context, owner string, m vmm.Machine) error {
	ctx, cancel := context.WithTimeout(ctx, controlTimeout)
	defer cancel()
	c, err := dialQMP(ctx, d.monitorPath(owner))
	if err != nil {
		return err
	}
	defer c.close()
	if m.Boot == nil {
		if err := restore(ctx, c, fdsetPath(numberFDs(d.profile, m).state)); err != nil {
			return err
		}
	}
	status, err := queryStatus(ctx, c)
	if err != nil {
		return err
	}
	if status != statusRunning {
		return fmt.Errorf("the machine is %s, not running", status)
	}
	return nil
}

// restore loads the device state and lets the vCPUs go on.
func restore(ctx context.Context, c *qmp, path string) error {
	if err := setCapabilities(ctx, c); err != nil {
		return err
	}
	uri := map[string]any{"uri": "file:" + path}
	if err := c.execute(ctx, call{name: "migrate-incoming", args: uri}); err != nil {
		return err
	}
	if err := awaitMigration(ctx, c); err != nil {
		return fmt.Errorf("restore the device state: %w", err)
	}
	return c.execute(ctx, call{name: "cont"})
}

// explain adds the end of QEMU's log to an error when QEMU has something to say.
func (d *Driver) explain(owner string, err error) error {
	code := cube.CodeInternal
	if c := cube.CodeOf(err); c == cube.CodeDeadlineExceeded || c == cube.CodeCanceled {
		code = c
	}
	tail := d.logTail(owner)
	switch {
	case tail != "":
		return cube.Errorf(code, "launch VMM %s: %w; QEMU says: %s", owner, err, tail)
	case errors.Is(err, errGone):
		return cube.Errorf(code, "launch VMM %s: %w and has said nothing", owner, err)
	}
	return cube.Errorf(code, "launch VMM %s: %w", owner, err)
}
