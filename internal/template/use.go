package template

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/durable"
	"github.com/cubesandbox/cubelet/internal/tplimage"
)

// Hold implements the engine's Templates.
func (m *Manager) Hold(templateID, user string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.hold(templateID, user)
}

// hold is called with mu held and reports whether the user is new.
func (m *Manager) hold(templateID, user string) bool {
	if m.users[templateID] == nil {
		m.users[templateID] = map[string]bool{}
	}
	if m.users[templateID][user] {
		return false
	}
	m.users[templateID][user] = true
	return true
}

// Release implements the engine's Templates.
func (m *Manager) Release(templateID, user string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.users[templateID], user)
	if len(m.users[templateID]) == 0 {
		delete(m.users, templateID)
	}
}

// Delete implements cube.Templates.
func (m *Manager) Delete(ctx context.Context, ref string, force bool) error {
	t, names, keys, err := m.take(ref, force)
	if err != nil {
		return err
	}
	id := t.manifest.Template.ID
	trash, err := m.discard(t.dirs)
	if err != nil {
		m.mu.Lock()
		m.templates[id] = t // it is still whole
		m.mu.Unlock()
		return fmt.Errorf("delete template %s: %w", id, err)
	}
	m.mu.Lock()
	for _, name := range names {
		if m.names[name] == id {
			delete(m.names, name)
		}
	}
	for _, key := range keys {
		delete(m.keys, key)
	}
	m.mu.Unlock()
	err = m.cfg.Records.Forget(context.WithoutCancel(ctx), id, names, keys)
	if err = errors.Join(err, durable.RemoveAll(trash)); err != nil {
		return fmt.Errorf("delete template %s: it is gone, but not all that belonged to it: %w", id, err)
	}
	return nil
}

// take makes a template that nobody uses, or any with force, invisible. Its users have
// the files open or hold links of their own: the space is freed with the last of them.
func (m *Manager) take(ref string, force bool) (t *template, names, keys []string, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if t, err = m.ready(ref); err != nil {
		return nil, nil, nil, err
	}
	id := t.manifest.Template.ID
	if err := m.inUse(t); err != nil && (!force || len(t.flights) > 0) {
		e := &cube.Error{Code: cube.CodeFailedPrecondition, Op: "delete template", ID: id, Err: err}
		return nil, nil, nil, e.WithHint("delete its users first, or use --force: they go on and its space is freed with the last of them")
	}
	for name, owner := range m.names {
		if owner == id {
			names = append(names, name)
		}
	}
	for key, k := range m.keys {
		if k.TemplateID == id {
			keys = append(keys, key)
		}
	}
	delete(m.templates, id)
	return t, names, keys, nil
}

// maxNamed is how many users an error names.
const maxNamed = 10

func (m *Manager) inUse(t *template) error {
	users := slices.Sorted(maps.Keys(m.users[t.manifest.Template.ID]))
	switch {
	case len(users) > maxNamed:
		return fmt.Errorf("it is used by %s and %d more", strings.Join(users[:maxNamed], ", "), len(users)-maxNamed)
	case len(users) > 0:
		return fmt.Errorf("it is used by %s", strings.Join(users, ", "))
	case len(t.flights) > 0:
		return errors.New("a memory image of it is being made")
	}
	return nil
}

// discard makes a directory no template any more, in one step that survives a crash, and
// returns where its files are now.
func (m *Manager) discard(d dirs) (trash string, err error) {
	trash = filepath.Join(m.cfg.Dir, trashPrefix+filepath.Base(d.root))
	if err := os.RemoveAll(trash); err != nil {
		return "", err
	}
	return trash, durable.Rename(d.root, trash)
}

// Acquire implements the engine's Templates.
func (m *Manager) Acquire(ctx context.Context, ref string, size cube.Resources, user string) (tplimage.Image, error) {
	t, size, held, err := m.acquire(ref, size, user)
	if err != nil {
		return tplimage.Image{}, err
	}
	id := t.manifest.Template.ID
	if err := m.ensure(ctx, t, size); err != nil {
		if held {
			m.Release(id, user)
		}
		return tplimage.Image{}, fmt.Errorf("template %s with %d vCPUs and %d MiB: %w", id, size.VCPUs, size.MemoryMiB, err)
	}
	return t.manifest.image(t.dirs, size), nil
}

// acquire resolves the reference and marks the template as used.
func (m *Manager) acquire(ref string, size cube.Resources, user string) (*template, cube.Resources, bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, size, false, errClosed
	}
	t, err := m.ready(ref)
	if err != nil {
		return nil, size, false, err
	}
	size.VCPUs = cmp.Or(size.VCPUs, t.manifest.Template.Resources.VCPUs)
	size.MemoryMiB = cmp.Or(size.MemoryMiB, t.manifest.Template.Resources.MemoryMiB)
	if err := m.cfg.Bounds.check(size); err != nil {
		return nil, size, false, err
	}
	return t, size, m.hold(t.manifest.Template.ID, user), nil
}

// ensure waits until the template has a memory image of that size for this machine.
func (m *Manager) ensure(ctx context.Context, t *template, size cube.Resources) error {
	for {
		j, joined, err := m.joinSize(t, size)
		switch {
		case err != nil || j == nil:
			return err
		case joined:
			_, err := m.follow(ctx, j, nil)
			return err
		}
		if err := awaitEnd(ctx, j); err != nil {
			return err
		}
	}
}

// awaitEnd waits for the end of a build that nobody may join any more.
func awaitEnd(ctx context.Context, j *job) error {
	select {
	case <-j.done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// joinSize returns the build of that size, nil when its memory image is there. joined
// tells whether the caller waits for it: a build that its last waiter has left cannot be
// joined.
func (m *Manager) joinSize(t *template, size cube.Resources) (j *job, joined bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	name := sizeName(size)
	if s, ok := t.sizes[name]; ok && s.Machine == m.cfg.Machine {
		return nil, false, nil
	}
	if m.closed {
		return nil, false, errClosed
	}
	if j := t.flights[name]; j != nil {
		if j.abandoned {
			return j, false, nil
		}
		j.waiters++
		return j, true, nil
	}
	ctx, cancel := context.WithCancelCause(m.ctx)
	j = newJob(cancel)
	j.waiters = 1
	t.flights[name] = j
	m.wg.Go(func() {
		defer cancel(nil)
		made, err := m.makeSize(ctx, memoryBuild{manifest: &t.manifest, dirs: t.dirs, size: size, feed: j.feed})
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(t.flights, name)
		if j.err = err; err == nil {
			t.sizes[name] = made
		}
		close(j.done)
	})
	return j, true, nil
}
