// Package qemu drives QEMU: it turns a vmm.Machine into arguments and files, starts it
// in a slot of the jail and speaks QMP with it.
//
// QEMU is given every file as an open descriptor and no path to anything. What the
// driver knows of a running machine is on the host only (the jail's list and the
// monitor socket RunDir/OWNER.qmp), so a restarted daemon controls the machines of the
// one before.
package qemu

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// DefaultTBSizeMiB is the size of TCG's buffer for translated code. Starting Python in a guest
// takes twice as long with 16 and does not end with 8; more than 64 gains nothing.
const DefaultTBSizeMiB = 64

// Names of an owner's files in RunDir.
const (
	monitorSuffix = ".qmp"
	logSuffix     = ".log"
)

// maxSocketPath is what a unix socket's address holds, in bytes.
const maxSocketPath = 107

// Config configures a Driver. Every field but TBSizeMiB is required.
type Config struct {
	Jail   Jail
	Binary string // absolute path of qemu-system-x86_64, outside and inside the jail
	RunDir string // exists, root only; short: it holds unix sockets
	Accel  string // AccelTCG or AccelKVM
	// TBSizeMiB bounds TCG's translated code. Zero: DefaultTBSizeMiB.
	TBSizeMiB int
	Log       *slog.Logger
}

// Driver runs virtual machines. It implements the engine's VMMs and what template
// builds need besides. Its methods may be called at once from many goroutines; calls
// for one owner that use the monitor wait for each other.
type Driver struct {
	jail    Jail
	runDir  string
	profile profile
	version string
	log     *slog.Logger
	tscKHz  func() int // measured once

	mu      sync.Mutex
	claimed map[string]vmm.Instance // by owner; a cache of the jail's list
}

// New returns a driver. It runs QEMU once for its version. Codes: FailedPrecondition
// when QEMU is missing or older than MinVersion.
func New(cfg Config) (*Driver, error) {
	if cfg.Accel != AccelTCG && cfg.Accel != AccelKVM {
		return nil, cube.Errorf(cube.CodeInvalid, "accelerator %q is not one of tcg, kvm", cfg.Accel)
	}
	if cfg.TBSizeMiB == 0 {
		cfg.TBSizeMiB = DefaultTBSizeMiB
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	version, err := Version(ctx, cfg.Binary)
	if err != nil {
		return nil, err
	}
	return &Driver{
		jail:    cfg.Jail,
		runDir:  cfg.RunDir,
		profile: profile{binary: cfg.Binary, accel: cfg.Accel, tbSizeMiB: cfg.TBSizeMiB},
		version: version,
		log:     cfg.Log,
		tscKHz:  sync.OnceValue(measureTSC),
		claimed: map[string]vmm.Instance{},
	}, nil
}

// MachineInfo returns what a memory image made here depends on. Kernel and Agent are
// left to the caller.
func (d *Driver) MachineInfo(context.Context) (cube.MachineInfo, error) {
	info := cube.MachineInfo{
		QEMU:        d.version,
		MachineType: machineType,
		CPUModel:    cpuModelTCG,
		Accelerator: d.profile.accel,
	}
	if d.profile.accel == AccelKVM {
		cpuinfo, err := os.ReadFile("/proc/cpuinfo")
		if err != nil {
			return cube.MachineInfo{}, fmt.Errorf("name the processor: %w", err)
		}
		info.CPUModel = cpuModelKVM + " (" + processorName(string(cpuinfo)) + ")"
	}
	return info, nil
}

// Claim takes a slot of the jail for the owner.
func (d *Driver) Claim(ctx context.Context, owner string, l vmm.Limits) (vmm.Instance, error) {
	if err := d.checkOwner(owner); err != nil {
		return vmm.Instance{}, err
	}
	inst, err := d.jail.Claim(ctx, owner, l)
	if err != nil {
		return vmm.Instance{}, err
	}
	d.mu.Lock()
	d.claimed[owner] = inst
	d.mu.Unlock()
	return inst, nil
}

// Destroy kills the owner's VMM and returns when its process is reaped, its slot gone
// and its files in RunDir removed. Succeeds when there is none.
func (d *Driver) Destroy(ctx context.Context, owner string) error {
	if err := d.checkOwner(owner); err != nil {
		return err
	}
	d.mu.Lock()
	delete(d.claimed, owner)
	d.mu.Unlock()
	if err := d.jail.Destroy(ctx, owner); err != nil {
		return err
	}
	return d.removeFiles(owner)
}

func (d *Driver) removeFiles(owner string) error {
	var errs []error
	for _, path := range [...]string{d.monitorPath(owner), d.logPath(owner)} {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("remove the files of VMM %s: %w", owner, err)
	}
	return nil
}

// List returns every claimed slot, also those claimed by an earlier daemon.
func (d *Driver) List(ctx context.Context) ([]vmm.Instance, error) { return d.jail.List(ctx) }

// Wait blocks until the owner's VMM process is gone. CodeNotFound when there is none.
func (d *Driver) Wait(ctx context.Context, owner string) (vmm.Exit, error) {
	return d.jail.Wait(ctx, owner)
}

// Sweep removes the files in RunDir whose owner has no slot: what a crash between the
// end of a slot and the removal of its files leaves.
func (d *Driver) Sweep(ctx context.Context) error {
	entries, err := os.ReadDir(d.runDir)
	if err != nil {
		return fmt.Errorf("sweep VMM files: %w", err)
	}
	// After the directory: an owner that appears in between has its slot first.
	instances, err := d.jail.List(ctx)
	if err != nil {
		return fmt.Errorf("sweep VMM files: %w", err)
	}
	alive := map[string]bool{}
	for _, inst := range instances {
		alive[inst.Owner] = true
	}
	var errs []error
	for _, e := range entries {
		owner, found := ownerOfFile(e.Name())
		if found && !alive[owner] {
			d.log.Info("remove files of a VMM that is gone", "owner", owner)
			errs = append(errs, d.removeFiles(owner))
		}
	}
	return errors.Join(errs...)
}

func ownerOfFile(name string) (owner string, ok bool) {
	if owner, ok = strings.CutSuffix(name, monitorSuffix); ok {
		return owner, true
	}
	return strings.CutSuffix(name, logSuffix)
}

func (d *Driver) monitorPath(owner string) string {
	return filepath.Join(d.runDir, owner+monitorSuffix)
}

func (d *Driver) logPath(owner string) string { return filepath.Join(d.runDir, owner+logSuffix) }

// ownerPattern keeps an owner from being a path, or more than one of QEMU's options.
var ownerPattern = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9._-]*$`)

func (d *Driver) checkOwner(owner string) error {
	if !ownerPattern.MatchString(owner) {
		return cube.Errorf(cube.CodeInvalid, "%q cannot own a VMM: only letters, digits and ._- are allowed", owner)
	}
	if path := d.monitorPath(owner); len(path) > maxSocketPath {
		return cube.Errorf(cube.CodeInvalid, "socket path %s is longer than %d bytes", path, maxSocketPath)
	}
	return nil
}

// instance returns the owner's slot. CodeNotFound when it has none.
func (d *Driver) instance(ctx context.Context, owner string) (vmm.Instance, error) {
	d.mu.Lock()
	inst, ok := d.claimed[owner]
	d.mu.Unlock()
	if ok {
		return inst, nil
	}
	all, err := d.jail.List(ctx)
	if err != nil {
		return vmm.Instance{}, fmt.Errorf("find VMM %s: %w", owner, err)
	}
	for _, inst := range all {
		if inst.Owner == owner {
			return inst, nil
		}
	}
	return vmm.Instance{}, cube.Errorf(cube.CodeNotFound, "no VMM slot is claimed for %s", owner)
}
