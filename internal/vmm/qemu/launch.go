package qemu

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

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
	err = d.start(ctx, inst, m, tap)
	if err == nil {
		err = d.run(ctx, owner, m)
	}
	if err == nil {
		return inst, nil
	}
	if m.Boot != nil && !errors.Is(err, fs.ErrExist) {
		_ = os.Remove(m.MemoryPath) // made by start; QEMU, if it lives, keeps its inode
	}
	return vmm.Instance{}, d.explain(owner, err)
}

// start makes the slot's launcher execve QEMU.
func (d *Driver) start(ctx context.Context, inst vmm.Instance, m vmm.Machine, tap *os.File) error {
	p := d.profile
	if m.Boot != nil && p.accel == AccelTCG {
		p.tscKHz = d.tscKHz()
	}
	if m.Boot == nil {
		bare, err := isBareState(m.StatePath)
		if err != nil {
			return err
		}
		p.bareState = bare
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
	// A machine that moved announces itself on its network, several times and from within
	// the guest. The namespace of a restored one knows its address already.
	quiet := map[string]any{"announce-rounds": 0}
	if err := c.execute(ctx, call{name: "migrate-set-parameters", args: quiet}); err != nil {
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
	tail := d.logTail(owner)
	switch {
	case tail != "":
		err = fmt.Errorf("%w; QEMU says: %s", err, tail)
	case errors.Is(err, errGone):
		err = fmt.Errorf("%w and has said nothing", err)
	}
	return fmt.Errorf("launch VMM %s: %w", owner, err)
}
