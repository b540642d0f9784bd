package template

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/durable"
	"github.com/cubesandbox/cubelet/internal/tplimage"
)

// The stages of a build that progress names.
const (
	stagePull     = "pull"
	stageUnpack   = "unpack"
	stageRootDisk = "root-disk"
	stageBoot     = "boot"
	stageStart    = "start"
	stageMemory   = "memory-image"
	stageDone     = "done"
)

// Create implements cube.Templates. A build whose callers have all gone is unwound.
func (m *Manager) Create(ctx context.Context, spec cube.TemplateSpec, progress func(cube.TemplateProgress)) (cube.Template, error) {
	spec, err := complete(spec, m.cfg.Bounds)
	if err != nil {
		return cube.Template{}, err
	}
	sum, err := digest(spec)
	if err != nil {
		return cube.Template{}, err
	}
	for {
		a, err := m.admit(spec, sum)
		switch {
		case err != nil:
			return cube.Template{}, err
		case a.build == nil:
			return a.template, nil
		case a.joined:
			t, err := m.follow(ctx, a.build.job, progress)
			if err != nil {
				return cube.Template{}, fmt.Errorf("create template %s: %w", a.build.spec.ID, err)
			}
			return t, nil
		}
		if err := awaitEnd(ctx, a.build.job); err != nil {
			return cube.Template{}, err
		}
	}
}

// admission is how a create goes on: with the build that it joined, after the end of one
// that nobody may join, or with the template that its key made before.
type admission struct {
	build    *build
	joined   bool
	template cube.Template
}

// admit joins the build of the same idempotency key, or starts one.
func (m *Manager) admit(spec cube.TemplateSpec, sum string) (admission, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return admission{}, errClosed
	}
	if spec.IdempotencyKey != "" {
		if a, found, err := m.byKey(spec.IdempotencyKey, sum); found || err != nil {
			return a, err
		}
	}
	switch {
	case spec.ID == "":
		for spec.ID = newID(); m.exists(spec.ID); {
			spec.ID = newID()
		}
	case m.building[spec.ID] != nil && m.building[spec.ID].abandoned:
		return admission{build: m.building[spec.ID]}, nil
	case m.exists(spec.ID):
		return admission{}, &cube.Error{Code: cube.CodeAlreadyExists, Op: "create template", ID: spec.ID, Field: "id", Err: errors.New("a template has this ID")}
	}
	ctx, cancel := context.WithCancelCause(m.ctx)
	b := &build{job: newJob(cancel), spec: spec, digest: sum, since: time.Now().UTC()}
	b.waiters = 1
	m.building[spec.ID] = b
	m.wg.Go(func() {
		defer cancel(nil)
		t, err := m.build(ctx, b)
		m.finish(b, t, err)
	})
	return admission{build: b, joined: true}, nil
}

// byKey is called with mu held.
func (m *Manager) byKey(key, sum string) (a admission, found bool, err error) {
	mismatch := func(id string) error {
		e := &cube.Error{Code: cube.CodeAlreadyExists, Op: "create template", Field: "idempotency_key", Err: fmt.Errorf("the key was used for another request, which made template %s", id)}
		return e.WithHint("use a new key for a new request")
	}
	for _, b := range m.building {
		switch {
		case b.spec.IdempotencyKey != key:
		case b.abandoned:
			return admission{build: b}, true, nil
		case b.digest != sum:
			return a, true, mismatch(b.spec.ID)
		default:
			b.waiters++
			return admission{build: b, joined: true}, true, nil
		}
	}
	k, ok := m.keys[key]
	t := m.templates[k.TemplateID]
	switch {
	case !ok || t == nil:
		return a, false, nil
	case k.Digest != sum:
		return a, true, mismatch(k.TemplateID)
	}
	return admission{template: m.describe(t)}, true, nil
}

func (m *Manager) finish(b *build, t *template, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.building, b.spec.ID)
	if err == nil {
		m.templates[b.spec.ID] = t
		m.learn(t.manifest.Entry)
		b.result = m.describe(t)
	}
	b.err = err
	close(b.done)
}

// build makes a template. After an error nothing of it is left.
func (m *Manager) build(ctx context.Context, b *build) (_ *template, err error) {
	d := dirs{filepath.Join(m.cfg.Dir, b.spec.ID)}
	if err := durable.Mkdir(d.root, 0o700); err != nil {
		if errors.Is(err, os.ErrExist) {
			return nil, cube.Errorf(cube.CodeAlreadyExists, "directory %s exists and is no usable template", d.root)
		}
		return nil, err
	}
	defer func() {
		if err != nil {
			err = withUndo(err, m.unmake(d))
		}
	}()
	root, err := m.rootDisk(ctx, b, d)
	if err != nil {
		return nil, err
	}
	man := b.manifest(root, m.cfg.Machine)
	size, err := m.makeSize(ctx, memoryBuild{manifest: &man, dirs: d, size: b.spec.Resources, feed: b.feed})
	if err != nil {
		return nil, err
	}
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	if err := writeManifest(d.manifest(), man); err != nil {
		return nil, err
	}
	if err := m.commit(context.WithoutCancel(ctx), man.Entry); err != nil {
		return nil, err
	}
	b.feed.stage(stageDone, "template "+b.spec.ID)
	return &template{manifest: man, dirs: d, sizes: map[string]sizeManifest{sizeName(size.Resources): size}, flights: map[string]*job{}}, nil
}

// commit completes the records. An error may come after the effect; then it is none.
func (m *Manager) commit(ctx context.Context, e Entry) error {
	err := m.cfg.Records.Commit(ctx, e)
	if err == nil {
		return nil
	}
	if book, loadErr := m.cfg.Records.Load(ctx); loadErr == nil && book.Known[e.ID] {
		m.cfg.Log.Warn("the template was recorded although an error was reported", "template", e.ID, "err", err)
		return nil
	}
	return fmt.Errorf("record template: %w", err)
}

// unmake removes what a failed build made, the manifest first.
func (m *Manager) unmake(d dirs) error {
	trash, err := m.discard(d)
	if err == nil {
		err = os.RemoveAll(trash)
	}
	if err != nil {
		return fmt.Errorf("remove unfinished template: %w", err)
	}
	return nil
}

func (b *build) manifest(root tplimage.Root, machine cube.MachineInfo) manifest {
	return manifest{
		Version: manifestVersion,
		Template: cube.Template{
			ID:           b.spec.ID,
			State:        cube.TemplateReady,
			Image:        cmp.Or(b.spec.Image, b.spec.ArchivePath),
			Digest:       root.Digest,
			Config:       root.Config,
			Resources:    b.spec.Resources,
			DiskMiB:      b.spec.DiskMiB,
			StartCommand: b.spec.StartCommand,
			Ready:        b.spec.Ready,
			CreatedAt:    b.since,
			RootBytes:    root.Bytes,
			Machine:      machine,
		},
		Env:   b.spec.Env,
		Entry: Entry{ID: b.spec.ID, Name: b.spec.Name, Key: b.spec.IdempotencyKey, KeyDigest: b.keyDigest()},
	}
}

func (b *build) keyDigest() string {
	if b.spec.IdempotencyKey == "" {
		return ""
	}
	return b.digest
}

// rootDisk makes the disks that every machine of the template begins with.
func (m *Manager) rootDisk(ctx context.Context, b *build, d dirs) (tplimage.Root, error) {
	first := stageUnpack
	if b.spec.Image != "" {
		first = stagePull
	}
	b.feed.stage(first, cmp.Or(b.spec.Image, b.spec.ArchivePath))
	src := tplimage.Source{Image: b.spec.Image, PlainHTTP: b.spec.PlainHTTP, ArchivePath: b.spec.ArchivePath}
	root, err := m.cfg.Images.Build(ctx, src, d.rootDisk(), b.feed.bytes)
	if err != nil {
		return root, err
	}
	if err := os.Chmod(d.rootDisk(), 0o444); err != nil {
		return root, err
	}
	b.feed.stage(stageRootDisk, fmt.Sprintf("%d MiB root disk, %d MiB writable layer", root.Bytes>>20, b.spec.DiskMiB))
	return root, makeLayer(ctx, d.base(), b.spec.DiskMiB)
}
