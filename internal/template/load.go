package template

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cubesandbox/cubelet/internal/durable"
)

// load reads the templates and makes directories and records agree.
func (m *Manager) load(ctx context.Context) error {
	entries, err := os.ReadDir(m.cfg.Dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := m.loadDir(dirs{filepath.Join(m.cfg.Dir, e.Name())}); err != nil {
			return fmt.Errorf("%s: %w", e.Name(), err)
		}
	}
	book, err := m.cfg.Records.Load(ctx)
	if err != nil {
		return err
	}
	if err := m.forgetMissing(ctx, &book); err != nil {
		return err
	}
	m.names, m.keys = book.Names, book.Keys
	return m.commitUnknown(ctx, book.Known)
}

// loadDir takes a template in, or removes what is none. A manifest that cannot be read
// is left for people to look at: it may be a disk fault.
func (m *Manager) loadDir(d dirs) error {
	name := filepath.Base(d.root)
	switch {
	case strings.HasPrefix(name, trashPrefix):
		return durable.RemoveAll(d.root)
	case !idPattern.MatchString(name):
		m.cfg.Log.Warn("not a template", "path", d.root)
		return nil
	}
	man, err := readManifest(d)
	if errors.Is(err, fs.ErrNotExist) {
		m.cfg.Log.Info("remove an unfinished template", "template", name)
		return durable.RemoveAll(d.root)
	}
	if err != nil {
		m.cfg.Log.Error("template cannot be used", "template", name, "err", err)
		return nil
	}
	sizes, err := readSizes(d, func(size string, err error) {
		m.cfg.Log.Warn("remove a damaged memory image, it is made anew when it is needed", "template", name, "size", size, "err", err)
	})
	if err != nil {
		return err
	}
	m.templates[name] = &template{manifest: man, dirs: d, sizes: sizes, flights: map[string]*job{}}
	return nil
}

// forgetMissing completes deletions: records of templates whose directory is gone.
// Records of templates that cannot be read stay.
func (m *Manager) forgetMissing(ctx context.Context, book *Book) error {
	gone := map[string]bool{}
	note := func(id string) {
		_, err := os.Lstat(filepath.Join(m.cfg.Dir, id))
		if m.templates[id] == nil && errors.Is(err, fs.ErrNotExist) {
			gone[id] = true
		}
	}
	for id := range book.Known {
		note(id)
	}
	for _, id := range book.Names {
		note(id)
	}
	for _, k := range book.Keys {
		note(k.TemplateID)
	}
	for id := range gone {
		names, keys := book.of(id)
		if err := m.cfg.Records.Forget(ctx, id, names, keys); err != nil {
			return err
		}
		delete(book.Known, id)
		for _, name := range names {
			delete(book.Names, name)
		}
		for _, key := range keys {
			delete(book.Keys, key)
		}
	}
	return nil
}

// of returns the names and keys of a template.
func (b *Book) of(id string) (names, keys []string) {
	for name, owner := range b.Names {
		if owner == id {
			names = append(names, name)
		}
	}
	for key, k := range b.Keys {
		if k.TemplateID == id {
			keys = append(keys, key)
		}
	}
	return names, keys
}

// commitUnknown completes builds: a crash after the manifest and before the commit.
func (m *Manager) commitUnknown(ctx context.Context, known map[string]bool) error {
	for id, t := range m.templates {
		if known[id] {
			continue
		}
		m.cfg.Log.Info("complete the records of a template", "template", id)
		if err := m.cfg.Records.Commit(ctx, t.manifest.Entry); err != nil {
			return err
		}
		m.learn(t.manifest.Entry)
	}
	return nil
}

// learn is what Records.Commit does, for the maps in memory.
func (m *Manager) learn(e Entry) {
	if e.Name != "" {
		m.names[e.Name] = e.ID
	}
	if e.Key != "" {
		m.keys[e.Key] = Key{Digest: e.KeyDigest, TemplateID: e.ID}
	}
}
