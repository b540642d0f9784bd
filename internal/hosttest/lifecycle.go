package hosttest

import (
	"context"
	"errors"
	"os"
	"path"
	"strings"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/tplimage"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// LifecycleOps names the operations of pause, resume, snapshot and rollback that a Fault
// can be set on.
func LifecycleOps() []string {
	return []string{
		"freeze", "pause-vmm", "resume-vmm", "tap", "link", "flush", "sync", "drop",
		"begin", "publish", "discard", "acquire-snapshot",
	}
}

// machine returns the owner's launched VMM. It is called with mu held.
func (w *World) machine(owner string) (*fakeVMM, error) {
	v, ok := w.vmms[owner]
	switch {
	case !ok:
		return nil, cube.Errorf(cube.CodeNotFound, "%s has no slot", owner)
	case !v.launched || v.inst.Process.PID == 0:
		return nil, cube.Errorf(cube.CodeFailedPrecondition, "no VMM runs in the slot of %s", owner)
	}
	return v, nil
}

// file returns the files of a path's directory and the path's name there. It is called
// with mu held.
func (w *World) file(p string) (files map[string]string, name string, err error) {
	owner := strings.TrimPrefix(path.Dir(p), "/pool/")
	files, ok := w.disks[owner]
	if !ok {
		return nil, "", cube.Errorf(cube.CodeNotFound, "no directory for %s", p)
	}
	return files, path.Base(p), nil
}

// add makes a file. It is called with mu held.
func (w *World) add(p, content string) error {
	files, name, err := w.file(p)
	if err != nil {
		return err
	}
	if _, ok := files[name]; ok {
		return cube.Errorf(cube.CodeAlreadyExists, "%s exists", p)
	}
	files[name] = content
	return nil
}

// Freeze implements the engine's interface.
func (f VMMs) Freeze(ctx context.Context, owner string, fr vmm.Freeze) (frozen vmm.Frozen, err error) {
	var v *fakeVMM
	err = f.W.do(ctx, "freeze", func() (err error) {
		if v, err = f.W.machine(owner); err != nil {
			return err
		}
		v.stopped = true
		if err := f.W.add(fr.MemoryPath, "memory of "+owner); err != nil {
			return err
		}
		return f.W.add(fr.StatePath, "state of "+owner)
	})
	if err == nil && fr.WhileFrozen != nil {
		err = fr.WhileFrozen()
	}
	f.W.mu.Lock()
	defer f.W.mu.Unlock()
	if v != nil && (err != nil || !fr.Stay) {
		v.stopped = false
	}
	if err != nil {
		for _, p := range []string{fr.MemoryPath, fr.StatePath} {
			if files, name, err := f.W.file(p); err == nil {
				delete(files, name)
			}
		}
	}
	return vmm.Frozen{DirtyBytes: 1 << 20}, err
}

// Pause implements the engine's interface.
func (f VMMs) Pause(ctx context.Context, owner string) error {
	return f.W.do(ctx, "pause-vmm", func() error { return f.W.setStopped(owner, true) })
}

// Resume implements the engine's interface.
func (f VMMs) Resume(ctx context.Context, owner string) error {
	return f.W.do(ctx, "resume-vmm", func() error { return f.W.setStopped(owner, false) })
}

func (w *World) setStopped(owner string, stopped bool) error {
	v, err := w.machine(owner)
	if err == nil {
		v.stopped = stopped
	}
	return err
}

// Tap implements the engine's interface.
func (f VMMs) Tap(ctx context.Context, owner string) (tap *os.File, err error) {
	err = f.W.do(ctx, "tap", func() (err error) {
		if _, err := f.W.machine(owner); err != nil {
			return err
		}
		tap, err = os.OpenFile(os.DevNull, os.O_RDWR, 0)
		return err
	})
	if err != nil && tap != nil {
		tap.Close()
		tap = nil
	}
	return tap, err
}

// Machine returns what the owner's VMM was launched with.
func (w *World) Machine(owner string) vmm.Machine {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.vmms[owner].machine
}

// Link implements the engine's interface.
func (f Disks) Link(ctx context.Context, src, dst string) error {
	return f.W.do(ctx, "link", func() error {
		if strings.Contains(src, "missing") {
			return cube.Errorf(cube.CodeNotFound, "%s does not exist", src)
		}
		return f.W.add(dst, src)
	})
}

// Flush implements the engine's interface.
func (f Disks) Flush(ctx context.Context, _ string) error {
	return f.W.do(ctx, "flush", func() error { return nil })
}

// Sync implements the engine's interface.
func (f Disks) Sync(ctx context.Context, paths ...string) error {
	return f.W.do(ctx, "sync", func() error {
		for _, p := range paths {
			files, name, err := f.W.file(p)
			if err != nil {
				return err
			}
			if _, ok := files[name]; !ok {
				return cube.Errorf(cube.CodeNotFound, "%s does not exist", p)
			}
		}
		return nil
	})
}

// Drop implements the engine's interface.
func (f Disks) Drop(ctx context.Context, paths ...string) error {
	return f.W.do(ctx, "drop", func() error {
		for _, p := range paths {
			if files, name, err := f.W.file(p); err == nil {
				delete(files, name)
			}
		}
		return nil
	})
}

type fakeSnapshot struct {
	ready bool
	data  cube.Snapshot
	image tplimage.Image
}

// Snapshots is the fake of the engine's Snapshots. Its directories are "/pool/<ID>".
type Snapshots struct{ W *World }

// Begin implements the engine's interface.
func (f Snapshots) Begin(ctx context.Context, s cube.Snapshot) (string, error) {
	err := f.W.do(ctx, "begin", func() error {
		if _, ok := f.W.snaps[s.ID]; ok {
			return cube.Errorf(cube.CodeAlreadyExists, "%s exists", s.ID)
		}
		f.W.snaps[s.ID], f.W.disks[s.ID] = &fakeSnapshot{}, map[string]string{}
		return nil
	})
	return "/pool/" + s.ID, err
}

// Publish implements the engine's interface.
func (f Snapshots) Publish(ctx context.Context, s cube.Snapshot, img tplimage.Image) (cube.Snapshot, error) {
	err := f.W.do(ctx, "publish", func() error {
		f.W.snaps[s.ID] = &fakeSnapshot{ready: true, data: s, image: img}
		return nil
	})
	return s, err
}

// Discard implements the engine's interface.
func (f Snapshots) Discard(ctx context.Context, id string) error {
	return f.W.do(ctx, "discard", func() error { return f.W.forgetSnapshot(id) })
}

func (w *World) forgetSnapshot(id string) error {
	delete(w.snaps, id)
	delete(w.disks, id)
	return nil
}

// Acquire implements the engine's interface.
func (f Snapshots) Acquire(ctx context.Context, ref, user string) (s cube.Snapshot, img tplimage.Image, err error) {
	err = f.W.do(ctx, "acquire-snapshot", func() error {
		sn, ok := f.W.snaps[ref]
		if !ok || !sn.ready {
			return &cube.Error{Code: cube.CodeNotFound, ID: ref, Err: errors.New("no such snapshot")}
		}
		Templates(f).hold(ref, user)
		s, img = sn.data, sn.image
		return nil
	})
	if err != nil {
		f.Release(ref, user)
	}
	return s, img, err
}

// Hold implements the engine's interface.
func (f Snapshots) Hold(id, user string) { Templates(f).Hold(id, user) }

// Release implements the engine's interface.
func (f Snapshots) Release(id, user string) { Templates(f).Release(id, user) }

// Delete implements the engine's interface.
func (f Snapshots) Delete(ctx context.Context, ref string, force bool) error {
	return f.W.do(ctx, "delete-snapshot", func() error {
		if len(f.W.users[ref]) > 0 && !force {
			return cube.Errorf(cube.CodeFailedPrecondition, "snapshot %s is in use", ref)
		}
		return f.W.forgetSnapshot(ref)
	})
}
