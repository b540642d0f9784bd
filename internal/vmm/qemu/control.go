package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
)

// statusRunning is QEMU's word for a machine whose vCPUs run.
const statusRunning = "running"

// Status returns QEMU's word for what the machine does: running, paused, shutdown, …
// Codes: NotFound (no slot),
// FailedPrecondition (no QEMU in it).
func (d *Driver) Status(ctx context.Context, owner string) (string, error) {
	var status string
	err := d.withMonitor(ctx, owner, "ask for the status of", func(ctx context.Context, c *qmp) error {
		var err error
		status, err = queryStatus(ctx, c)
		return err
	})
	return status, err
}

// Pause stops the vCPUs. Pausing a paused machine does nothing. Codes: NotFound.
func (d *Driver) Pause(ctx context.Context, owner string) error {
	return d.command(ctx, owner, "pause", "stop")
}

// Resume lets the vCPUs go on. Resuming a running machine does nothing. Codes: NotFound.
func (d *Driver) Resume(ctx context.Context, owner string) error {
	return d.command(ctx, owner, "resume", "cont")
}

// Powerdown presses the machine's power button and returns at once; a guest may ignore
// it. Codes: NotFound.
func (d *Driver) Powerdown(ctx context.Context, owner string) error {
	return d.command(ctx, owner, "power down", "system_powerdown")
}

// Quit ends QEMU at once. The slot is left to Destroy. Codes: NotFound.
func (d *Driver) Quit(ctx context.Context, owner string) error {
	return d.command(ctx, owner, "quit", "quit")
}

// Save stops the vCPUs and writes the device state to a new file, without the memory,
// which is the file that the machine was booted on. When it returns, both are on the
// disk and fit each other as long as the machine stays stopped: destroy it next, then
// Seal the files. Codes: NotFound, NoSpace.
func (d *Driver) Save(ctx context.Context, owner, statePath string) error {
	err := d.withMonitor(ctx, owner, "save", func(ctx context.Context, c *qmp) error {
		if err := c.execute(ctx, call{name: "stop"}); err != nil {
			return err
		}
		return saveState(ctx, c, statePath)
	})
	if err != nil {
		return err
	}
	inst, err := d.instance(ctx, owner)
	if err == nil {
		err = syncMemory(inst)
	}
	if err != nil {
		_ = os.Remove(statePath)
	}
	return err
}

func saveState(ctx context.Context, c *qmp, path string) (err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, f.Close())
		if err != nil {
			_ = os.Remove(path)
		}
	}()
	if err := migrate(ctx, c, f); err != nil {
		return err
	}
	return f.Sync()
}

// migrate makes QEMU write its device state to f.
func migrate(ctx context.Context, c *qmp, f *os.File) error {
	if err := setCapabilities(ctx, c); err != nil {
		return err
	}
	var set struct {
		ID int `json:"fdset-id"`
	}
	if err := c.execute(ctx, call{name: "add-fd", result: &set, file: f}); err != nil {
		return err
	}
	uri := map[string]any{"uri": "file:" + fdsetPath(set.ID)}
	if err := c.execute(ctx, call{name: "migrate", args: uri}); err != nil {
		return err
	}
	if err := awaitMigration(ctx, c); err != nil {
		return fmt.Errorf("write the device state: %w", err)
	}
	return c.execute(ctx, call{name: "remove-fd", args: map[string]any{"fdset-id": set.ID}})
}

// setCapabilities asks for events, and for device state without shared memory. Both
// ends of a migration must agree on the latter.
func setCapabilities(ctx context.Context, c *qmp) error {
	type capability struct {
		Capability string `json:"capability"`
		State      bool   `json:"state"`
	}
	list := []capability{{"events", true}, {stateCapability, true}}
	return c.execute(ctx, call{name: "migrate-set-capabilities", args: map[string]any{"capabilities": list}})
}

// awaitMigration waits for the end of the migration that was started last.
func awaitMigration(ctx context.Context, c *qmp) error {
	var status string
	_, err := c.await(ctx, func(e qmpEvent) bool {
		if e.Name != "MIGRATION" {
			return false
		}
		var data struct {
			Status string `json:"status"`
		}
		if json.Unmarshal(e.Data, &data) != nil {
			return false
		}
		status = data.Status
		return status == "completed" || status == "failed" || status == "cancelled"
	})
	if err != nil {
		return err
	}
	if status == "completed" {
		return nil
	}
	var info struct {
		Desc string `json:"error-desc"`
	}
	if err := c.execute(ctx, call{name: "query-migrate", result: &info}); err != nil {
		return fmt.Errorf("%s: %w", status, err)
	}
	return fmt.Errorf("%s: %s", status, info.Desc)
}

func queryStatus(ctx context.Context, c *qmp) (string, error) {
	var status struct {
		Status string `json:"status"`
	}
	err := c.execute(ctx, call{name: "query-status", result: &status})
	return status.Status, err
}

func (d *Driver) command(ctx context.Context, owner, verb, name string) error {
	return d.withMonitor(ctx, owner, verb, func(ctx context.Context, c *qmp) error {
		return c.execute(ctx, call{name: name})
	})
}

// controlTimeout bounds what a caller without a deadline waits for a QEMU that hangs.
const controlTimeout = 60 * time.Second

// withMonitor runs f with a connection to the owner's monitor. verb words the errors.
func (d *Driver) withMonitor(ctx context.Context, owner, verb string, f func(context.Context, *qmp) error) error {
	if err := d.checkOwner(owner); err != nil {
		return err
	}
	if _, err := d.instance(ctx, owner); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, controlTimeout)
	defer cancel()
	c, err := dialQMP(ctx, d.monitorPath(owner))
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENOENT) {
		return cube.Errorf(cube.CodeFailedPrecondition, "%s VMM %s: no QEMU runs in its slot", verb, owner)
	}
	if err != nil {
		return fmt.Errorf("%s VMM %s: %w", verb, owner, err)
	}
	defer c.close()
	if err := f(ctx, c); err != nil {
		return fmt.Errorf("%s VMM %s: %w", verb, owner, err)
	}
	return nil
}

// Seal makes the files of a memory image immutable: owned by root, 0444, on the disk.
// The machine that wrote them must be destroyed. Syncing the directory is the caller's.
func Seal(memoryPath, statePath string) error {
	for _, path := range [...]string{memoryPath, statePath} {
		if err := seal(path); err != nil {
			return fmt.Errorf("seal %s: %w", path, err)
		}
	}
	return nil
}

func seal(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Chown(0, 0); err != nil {
		return err
	}
	if err := f.Chmod(0o444); err != nil {
		return err
	}
	return f.Sync()
}
