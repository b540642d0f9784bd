package template

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/durable"
	"github.com/cubesandbox/cubelet/internal/guestapi"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

const (
	// guestMAC is every guest's network address: each has a network of its own.
	guestMAC = "02:cb:00:00:00:01"

	// spareBytes of the pool stay free when a memory image is made. A pool that is full
	// kills the machine that writes to it.
	spareBytes = 64 << 20

	syncTimeout = 30 * time.Second
)

// memoryBuild is the making of one memory image.
type memoryBuild struct {
	manifest *manifest
	dirs     dirs
	size     cube.Resources
	feed     *feed
}

// owner names the build's host objects.
func (b memoryBuild) owner() string { return b.manifest.Template.ID + "-" + sizeName(b.size) }

func (b memoryBuild) work() string { return b.dirs.work(b.size) }

// makeSize boots a machine from the template's disks, brings it to where its sandboxes
// begin, and keeps its memory, device state and writable layer of one instant. After an
// error nothing of it is left; the error carries the end of the guest's console.
func (m *Manager) makeSize(ctx context.Context, b memoryBuild) (_ sizeManifest, err error) {
	release, err := m.reserve(b.size)
	if err != nil {
		return sizeManifest{}, err
	}
	defer release()
	if err := os.MkdirAll(b.work(), 0o700); err != nil {
		return sizeManifest{}, err
	}
	defer func() {
		if err != nil {
			err = withUndo(err, os.RemoveAll(b.work()))
		}
	}()
	if err := m.cfg.Disks.Clone(ctx, b.dirs.base(), filepath.Join(b.work(), layerName)); err != nil {
		return sizeManifest{}, err
	}
	if err := m.runMachine(ctx, b); err != nil {
		return sizeManifest{}, m.explain(err, filepath.Join(b.work(), consoleName))
	}
	return m.publish(b)
}

// reserve sets space of the pool aside for a guest's memory.
func (m *Manager) reserve(r cube.Resources) (release func(), err error) {
	var st syscall.Statfs_t
	if err := syscall.Statfs(m.cfg.Dir, &st); err != nil {
		return nil, fmt.Errorf("free space of the pool: %w", err)
	}
	need := int64(r.MemoryMiB) << 20
	m.mu.Lock()
	defer m.mu.Unlock()
	if free := int64(st.Bavail)*st.Bsize - m.reserved; free < need+spareBytes {
		return nil, cube.Errorf(cube.CodeNoSpace, "a memory image of %d MiB does not fit on the pool, where %d MiB are free", r.MemoryMiB, max(free, 0)>>20)
	}
	m.reserved += need
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.reserved -= need
	}, nil
}

// runMachine has the machine write its memory image. No VMM and no network is left of it.
func (m *Manager) runMachine(ctx context.Context, b memoryBuild) (err error) {
	owner := b.owner()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer func() {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		err = withUndo(err, m.cfg.VMMs.Destroy(undo, owner), m.cfg.Network.Release(undo, owner))
	}()
	b.feed.stage(stageBoot, fmt.Sprintf("%d vCPUs, %d MiB", b.size.VCPUs, b.size.MemoryMiB))
	if err := m.launch(ctx, b); err != nil {
		return err
	}
	watch, stop := context.WithCancel(ctx)
	defer stop()
	m.wg.Go(func() { m.watchExit(watch, owner, cancel) })
	g := guestSession{m: m, b: b, dial: func(ctx context.Context, port int) (net.Conn, error) { return m.cfg.Network.Dial(ctx, owner, port) }}
	if err := g.prepare(ctx); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return cause // the machine died, or nobody waits any more
		}
		return err
	}
	b.feed.stage(stageMemory, "")
	stop()
	return m.cfg.VMMs.Save(ctx, owner, filepath.Join(b.work(), stateName))
}

func (m *Manager) launch(ctx context.Context, b memoryBuild) error {
	if _, err := m.cfg.VMMs.Claim(ctx, b.owner(), m.cfg.Limits(b.size)); err != nil {
		return err
	}
	tap, err := m.cfg.Network.Claim(ctx, b.owner(), cube.NetworkSpec{})
	if err != nil {
		return err
	}
	_, err = m.cfg.VMMs.Launch(ctx, b.owner(), m.machine(b), tap)
	return errors.Join(err, tap.Close())
}

func (m *Manager) machine(b memoryBuild) vmm.Machine {
	return vmm.Machine{
		VCPUs:       b.size.VCPUs,
		MemoryMiB:   b.size.MemoryMiB,
		MemoryPath:  filepath.Join(b.work(), memoryName),
		Boot:        &vmm.Boot{Kernel: m.cfg.Kernel, Initrd: m.cfg.Initrd, Cmdline: m.cfg.Cmdline},
		Disks:       []vmm.Disk{{Path: b.dirs.rootDisk(), ReadOnly: true}, {Path: filepath.Join(b.work(), layerName)}},
		MAC:         guestMAC,
		ConsolePath: filepath.Join(b.work(), consoleName),
	}
}

// watchExit ends the build at once when its machine ends.
func (m *Manager) watchExit(ctx context.Context, owner string, cancel context.CancelCauseFunc) {
	exit, err := m.cfg.VMMs.Wait(ctx, owner)
	if err == nil && ctx.Err() == nil {
		cancel(cube.Errorf(cube.CodeInternal, "the virtual machine ended by itself with code %d", exit.Code))
	}
}

// publish makes the files of the memory image immutable and gives them their name.
func (m *Manager) publish(b memoryBuild) (sizeManifest, error) {
	s := sizeManifest{Version: manifestVersion, Resources: b.size, Machine: m.cfg.Machine, CreatedAt: time.Now().UTC()}
	for name, size := range map[string]*int64{memoryName: &s.MemoryBytes, stateName: &s.StateBytes, layerName: &s.LayerBytes} {
		n, err := seal(filepath.Join(b.work(), name))
		if err != nil {
			return s, fmt.Errorf("seal %s: %w", name, err)
		}
		*size = n
	}
	if err := removeIfThere(filepath.Join(b.work(), consoleName)); err != nil {
		return s, err
	}
	if err := writeManifest(filepath.Join(b.work(), manifestName), s); err != nil {
		return s, err
	}
	final := b.dirs.size(b.size)
	old := filepath.Join(b.dirs.sizes(), trashPrefix+sizeName(b.size))
	if err := os.Rename(final, old); err != nil && !errors.Is(err, os.ErrNotExist) {
		return s, err
	}
	if err := durable.Rename(b.work(), final); err != nil {
		return s, err
	}
	if err := os.RemoveAll(old); err != nil {
		m.cfg.Log.Warn("remove an outdated memory image", "path", old, "err", err)
	}
	return s, durable.SyncDir(b.dirs.root)
}

// seal makes a file immutable, owned by root and on the disk, and returns its size.
func seal(path string) (int64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return info.Size(), errors.Join(f.Chown(0, 0), f.Chmod(0o444), f.Sync())
}

// identity is what the agent is told while the template is built. There is no token: a
// sandbox sets its own, and until then nothing but this node reaches the guest.
func (m *Manager) identity(b memoryBuild) guestapi.Init {
	var entropy, machineID [32]byte
	rand.Read(entropy[:])
	rand.Read(machineID[:])
	config := b.manifest.Template.Config
	return guestapi.Init{
		SandboxID:   b.manifest.Template.ID,
		TemplateID:  b.manifest.Template.ID,
		Hostname:    "template",
		MachineID:   hex.EncodeToString(machineID[:16]),
		Entropy:     entropy[:],
		Time:        time.Now(),
		Env:         b.manifest.environment(),
		User:        config.User,
		Workdir:     config.WorkingDir,
		Nameservers: m.cfg.Nameservers,
		Entrypoint:  config.Entrypoint,
		Cmd:         config.Cmd,
	}
}
