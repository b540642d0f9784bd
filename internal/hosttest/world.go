// Package hosttest is a host for unit tests: fakes with state for everything that the
// engine needs of the kernel, one World per test, and the conformance suites that both
// the fakes and the real adapters pass.
package hosttest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"sync"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/guestapi"
	"github.com/cubesandbox/cubelet/internal/tplimage"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// World is a fake host. It outlives a daemon: hand the same World to a second engine
// to test recovery. The zero value is not usable; see NewWorld.
type World struct {
	mu       sync.Mutex
	vmms     map[string]*fakeVMM
	networks map[string]cube.NetworkSpec
	disks    map[string]map[string]string // owner -> file -> content
	users    map[string]map[string]bool   // template or snapshot -> users
	snaps    map[string]*fakeSnapshot
	inits    map[string]guestapi.Init
	faults   map[string]Fault
	nextPID  int
}

// Fault makes one operation go wrong.
type Fault struct {
	Err error
	// AfterEffect makes the effect first and reports the error then.
	AfterEffect bool
	// Block waits for the context's end instead of failing at once.
	Block bool
	// Reached is closed, when not nil, as the operation begins.
	Reached chan struct{}
}

type fakeVMM struct {
	inst     vmm.Instance
	limits   vmm.Limits
	launched bool
	stopped  bool // its vCPUs are
	machine  vmm.Machine
	exited   chan struct{}
	code     int
}

// NewWorld returns an empty host with the template "tpl-base", also named "base".
func NewWorld() *World {
	return &World{
		vmms:     map[string]*fakeVMM{},
		networks: map[string]cube.NetworkSpec{},
		disks:    map[string]map[string]string{},
		users:    map[string]map[string]bool{},
		snaps:    map[string]*fakeSnapshot{},
		inits:    map[string]guestapi.Init{},
		faults:   map[string]Fault{},
		nextPID:  1000,
	}
}

// Ops names the operations that a Fault can be set on, in a create's order.
func Ops() []string {
	return []string{"acquire", "claim-vmm", "claim-network", "create-disk", "link", "clone", "launch", "init"}
}

// Break sets the fault of an operation; a zero Fault mends it.
func (w *World) Break(op string, f Fault) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if f == (Fault{}) {
		delete(w.faults, op)
		return
	}
	w.faults[op] = f
}

// do runs an effect under the operation's fault.
func (w *World) do(ctx context.Context, op string, effect func() error) error {
	w.mu.Lock()
	f, broken := w.faults[op]
	w.mu.Unlock()
	if broken && f.Reached != nil {
		close(f.Reached)
	}
	if broken && f.Block {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	if broken && !f.AfterEffect {
		return f.Err
	}
	w.mu.Lock()
	err := effect()
	w.mu.Unlock()
	if err == nil && broken {
		err = f.Err
	}
	return err
}

// String prints what exists, one object a line, sorted; empty when there is nothing.
func (w *World) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var lines []string
	for o, v := range w.vmms {
		line := fmt.Sprintf("vmm %s launched=%v", o, v.launched)
		if v.stopped {
			line += " stopped"
		}
		lines = append(lines, line)
	}
	for o, n := range w.networks {
		lines = append(lines, fmt.Sprintf("network %s %s", o, n.CIDR))
	}
	for o, files := range w.disks {
		lines = append(lines, fmt.Sprintf("disk %s %v", o, slices.Sorted(maps.Keys(files))))
	}
	for id, sn := range w.snaps {
		lines = append(lines, fmt.Sprintf("snapshot %s ready=%v", id, sn.ready))
	}
	for tpl, users := range w.users {
		for u := range users {
			lines = append(lines, fmt.Sprintf("user %s of %s", u, tpl))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// Kill ends the owner's VMM with a code, as if it crashed.
func (w *World) Kill(owner string, code int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	v := w.vmms[owner]
	v.code = code
	v.inst.Process = vmm.Process{}
	close(v.exited)
}

// Told returns what the owner's guest agent was told last.
func (w *World) Told(owner string) guestapi.Init {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.inits[owner]
}

// VMMs is the fake of the engine's VMMs.
type VMMs struct{ W *World }

// Claim implements the engine's interface.
func (f VMMs) Claim(ctx context.Context, owner string, l vmm.Limits) (inst vmm.Instance, err error) {
	err = f.W.do(ctx, "claim-vmm", func() error {
		if _, ok := f.W.vmms[owner]; ok {
			return cube.Errorf(cube.CodeAlreadyExists, "%s has a slot", owner)
		}
		f.W.nextPID++
		inst = vmm.Instance{Owner: owner, Slot: "slot-" + owner, UID: 64000 + f.W.nextPID, Process: vmm.Process{PID: f.W.nextPID, StartTime: uint64(f.W.nextPID)}}
		f.W.vmms[owner] = &fakeVMM{inst: inst, limits: l, exited: make(chan struct{})}
		return nil
	})
	return inst, err
}

// Launch implements the engine's interface.
func (f VMMs) Launch(ctx context.Context, owner string, m vmm.Machine, tap *os.File) (inst vmm.Instance, err error) {
	err = f.W.do(ctx, "launch", func() error {
		v, ok := f.W.vmms[owner]
		switch {
		case !ok:
			return cube.Errorf(cube.CodeNotFound, "%s has no slot", owner)
		case tap == nil:
			return errors.New("no tap")
		case (m.Boot == nil) == (m.StatePath == ""):
			return errors.New("machine must either boot or restore")
		}
		v.launched, v.machine = true, m
		inst = v.inst
		return nil
	})
	return inst, err
}

// Destroy implements the engine's interface.
func (f VMMs) Destroy(ctx context.Context, owner string) error {
	return f.W.do(ctx, "destroy-vmm", func() error {
		v, ok := f.W.vmms[owner]
		if !ok {
			return nil
		}
		if v.inst.Process.PID != 0 {
			v.code = 137
			close(v.exited)
		}
		delete(f.W.vmms, owner)
		return nil
	})
}

// List implements the engine's interface.
func (f VMMs) List(context.Context) ([]vmm.Instance, error) {
	f.W.mu.Lock()
	defer f.W.mu.Unlock()
	var all []vmm.Instance
	for _, v := range f.W.vmms {
		all = append(all, v.inst)
	}
	return all, nil
}

// Wait implements the engine's interface.
func (f VMMs) Wait(ctx context.Context, owner string) (vmm.Exit, error) {
	f.W.mu.Lock()
	v, ok := f.W.vmms[owner]
	f.W.mu.Unlock()
	if !ok {
		return vmm.Exit{}, cube.Errorf(cube.CodeNotFound, "%s has no VMM", owner)
	}
	select {
	case <-v.exited:
		return vmm.Exit{Owner: owner, Code: v.code}, nil
	case <-ctx.Done():
		return vmm.Exit{}, context.Cause(ctx)
	}
}

// Network is the fake of the engine's Network.
type Network struct{ W *World }

// Claim implements the engine's interface. The tap is /dev/null.
func (f Network) Claim(ctx context.Context, owner string, spec cube.NetworkSpec) (tap *os.File, err error) {
	err = f.W.do(ctx, "claim-network", func() error {
		if _, ok := f.W.networks[owner]; ok {
			return cube.Errorf(cube.CodeAlreadyExists, "%s has a network", owner)
		}
		tap, err = os.OpenFile(os.DevNull, os.O_RDWR, 0)
		if err == nil {
			f.W.networks[owner] = spec
		}
		return err
	})
	if err != nil && tap != nil {
		tap.Close()
		tap = nil
	}
	return tap, err
}

// Release implements the engine's interface.
func (f Network) Release(ctx context.Context, owner string) error {
	return f.W.do(ctx, "release-network", func() error {
		delete(f.W.networks, owner)
		return nil
	})
}

// List implements the engine's interface.
func (f Network) List(context.Context) ([]string, error) {
	f.W.mu.Lock()
	defer f.W.mu.Unlock()
	return slices.Collect(maps.Keys(f.W.networks)), nil
}

// Dial implements the engine's interface: the other end echoes nothing and is closed.
func (f Network) Dial(_ context.Context, owner string, _ int) (net.Conn, error) {
	f.W.mu.Lock()
	defer f.W.mu.Unlock()
	if _, ok := f.W.networks[owner]; !ok {
		return nil, cube.Errorf(cube.CodeNotFound, "%s has no network", owner)
	}
	host, guest := net.Pipe()
	guest.Close()
	return host, nil
}

// Disks is the fake of the engine's Disks. Its directories are "/pool/<owner>".
type Disks struct{ W *World }

// Create implements the engine's interface.
func (f Disks) Create(ctx context.Context, owner string) (string, error) {
	err := f.W.do(ctx, "create-disk", func() error {
		if _, ok := f.W.disks[owner]; ok {
			return cube.Errorf(cube.CodeAlreadyExists, "%s has a directory", owner)
		}
		f.W.disks[owner] = map[string]string{}
		return nil
	})
	return "/pool/" + owner, err
}

// Clone implements the engine's interface.
func (f Disks) Clone(ctx context.Context, src, dst string) error {
	return f.W.do(ctx, "clone", func() error {
		owner, file, _ := strings.Cut(strings.TrimPrefix(dst, "/pool/"), "/")
		files, ok := f.W.disks[owner]
		if !ok {
			return cube.Errorf(cube.CodeNotFound, "no directory for %s", dst)
		}
		if _, ok := files[file]; ok {
			return cube.Errorf(cube.CodeAlreadyExists, "%s exists", dst)
		}
		if strings.Contains(src, "missing") {
			return cube.Errorf(cube.CodeNotFound, "%s does not exist", src)
		}
		files[file] = src
		return nil
	})
}

// Remove implements the engine's interface.
func (f Disks) Remove(ctx context.Context, owner string) error {
	return f.W.do(ctx, "remove-disk", func() error {
		delete(f.W.disks, owner)
		return nil
	})
}

// List implements the engine's interface.
func (f Disks) List(context.Context) ([]string, error) {
	f.W.mu.Lock()
	defer f.W.mu.Unlock()
	var owners []string
	for owner := range f.W.disks {
		if _, snapshot := f.W.snaps[owner]; !snapshot {
			owners = append(owners, owner)
		}
	}
	return owners, nil
}

// Templates is the fake of the engine's Templates.
type Templates struct{ W *World }

// Acquire implements the engine's interface.
func (f Templates) Acquire(ctx context.Context, ref string, size cube.Resources, user string) (img tplimage.Image, err error) {
	id, err := f.Resolve(ctx, ref)
	if err != nil {
		return img, err
	}
	if size.VCPUs == 0 {
		size.VCPUs = 1
	}
	if size.MemoryMiB == 0 {
		size.MemoryMiB = 512
	}
	err = f.W.do(ctx, "acquire", func() error {
		f.hold(id, user)
		img = tplimage.Image{TemplateID: id, Resources: size, RootPath: "/t/root", LayerPath: "/t/layer", MemoryPath: "/t/memory", StatePath: "/t/state", MAC: "02:cb:00:00:00:01"}
		return nil
	})
	if err != nil {
		f.Release(id, user)
	}
	return img, err
}

func (f Templates) hold(id, user string) {
	if f.W.users[id] == nil {
		f.W.users[id] = map[string]bool{}
	}
	f.W.users[id][user] = true
}

// Hold implements the engine's interface.
func (f Templates) Hold(id, user string) {
	f.W.mu.Lock()
	defer f.W.mu.Unlock()
	f.hold(id, user)
}

// Release implements the engine's interface.
func (f Templates) Release(id, user string) {
	f.W.mu.Lock()
	defer f.W.mu.Unlock()
	delete(f.W.users[id], user)
}

// Resolve implements the engine's interface.
func (f Templates) Resolve(_ context.Context, ref string) (string, error) {
	if ref == "base" || ref == "tpl-base" {
		return "tpl-base", nil
	}
	return "", &cube.Error{Code: cube.CodeNotFound, ID: ref, Err: errors.New("no such template")}
}

// Guest is the fake of the engine's Guest.
type Guest struct{ W *World }

// Init implements the engine's interface.
func (f Guest) Init(ctx context.Context, _ guestapi.Dialer, in guestapi.Init) error {
	return f.W.do(ctx, "init", func() error {
		f.W.inits[in.SandboxID] = in
		return nil
	})
}

// Exec implements the engine's interface: there are no programs in a fake guest.
func (f Guest) Exec(context.Context, guestapi.Dialer, string, cube.ExecSpec) (cube.ExecSession, error) {
	return nil, cube.Errorf(cube.CodeUnimplemented, "a fake guest runs no programs")
}

// Dead returns the host as it is now, for a second engine: what the engine of this one
// still does, as it ends, does not reach it. Who uses what is an engine's knowledge.
func (w *World) Dead() *World {
	w.mu.Lock()
	defer w.mu.Unlock()
	c := NewWorld()
	c.nextPID = w.nextPID
	maps.Copy(c.networks, w.networks)
	maps.Copy(c.snaps, w.snaps)
	maps.Copy(c.inits, w.inits)
	for owner, v := range w.vmms {
		n := *v
		n.exited = make(chan struct{})
		c.vmms[owner] = &n
	}
	for owner, files := range w.disks {
		c.disks[owner] = maps.Clone(files)
	}
	return c
}
