package storage

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/base32"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	cube "github.com/cubesandbox/cubelet"
)

// Get implements cube.Snapshots.
func (c *Catalogue) Get(_ context.Context, ref string) (cube.Snapshot, error) {
	c.mu.Lock()
	e, err := c.find(ref)
	if err != nil {
		c.mu.Unlock()
		return cube.Snapshot{}, err
	}
	s := c.render(e)
	c.mu.Unlock()
	for _, name := range []string{rootFile, layerFile, memoryFile, stateFile} {
		u, err := usageOf(filepath.Join(c.dir(s.ID), name))
		if err != nil {
			return s, fmt.Errorf("usage of snapshot %s: %w", s.ID, err)
		}
		s.Usage.Logical += u.Logical
		s.Usage.Exclusive += u.Exclusive
		s.Usage.Shared += u.Shared
	}
	return s, nil
}

// List implements cube.Snapshots.
func (c *Catalogue) List(context.Context) ([]cube.Snapshot, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := []cube.Snapshot{}
	for _, e := range c.all {
		if e.record.State == SnapshotReady {
			all = append(all, c.render(e))
		}
	}
	slices.SortFunc(all, func(a, b cube.Snapshot) int {
		return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID))
	})
	return all, nil
}

// maxNamed is how many users an error names.
const maxNamed = 10

// Delete implements cube.Snapshots. The users of a snapshot have its files open or hold
// links of their own, so that with force all of it can be removed at once: the space is
// freed with the last of them.
func (c *Catalogue) Delete(ctx context.Context, ref string, force bool) error {
	r, err := c.take(ref, force)
	if err != nil {
		return err
	}
	ctx = context.WithoutCancel(ctx)
	if err := c.cfg.Records.Put(ctx, r); err != nil {
		c.mu.Lock()
		c.all[r.ID].record.State = SnapshotReady // it is still whole
		c.mu.Unlock()
		return fmt.Errorf("journal the delete of snapshot %s: %w", r.ID, err)
	}
	if err := c.Discard(ctx, r.ID); err != nil {
		return fmt.Errorf("snapshot %s is gone, but not all that belonged to it: %w", r.ID, err)
	}
	return nil
}

// take makes a snapshot that nobody uses, or any with force, invisible.
func (c *Catalogue) take(ref string, force bool) (SnapshotRecord, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, err := c.find(ref)
	if err != nil {
		return SnapshotRecord{}, err
	}
	if users := c.render(e).Users; len(users) > 0 && !force {
		text := strings.Join(users[:min(len(users), maxNamed)], ", ")
		if more := len(users) - maxNamed; more > 0 {
			text += fmt.Sprintf(" and %d more", more)
		}
		err := &cube.Error{Code: cube.CodeFailedPrecondition, Op: "delete snapshot", ID: e.record.ID, Err: errors.New("it is used by " + text)}
		return SnapshotRecord{}, err.WithHint("delete its users first, or use --force: they go on and its space is freed with the last of them")
	}
	e.record.State = SnapshotDeleting
	return e.record, nil
}

// NewSnapshotID draws an ID of 100 random bits.
func NewSnapshotID() string {
	b := make([]byte, 13)
	rand.Read(b) // never fails, see its documentation
	return "snap-" + strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(b))[:20]
}

// Clone implements cube.Snapshots. On a pool with reflinks no block is copied.
func (c *Catalogue) Clone(ctx context.Context, srcRef, dst string) (cube.Snapshot, error) {
	if dst == "" {
		return cube.Snapshot{}, cube.InvalidField("destination", "is required")
	}
	id, name := NewSnapshotID(), dst
	if snapshotID.MatchString(dst) {
		id, name = dst, ""
	}
	user := id + "/clone"
	source, img, err := c.Acquire(ctx, srcRef, user)
	if err != nil {
		return cube.Snapshot{}, err
	}
	defer c.Release(source.ID, user)
	s := source
	s.ID, s.Name, s.ParentID, s.CreatedAt, s.Timings, s.Frozen = id, name, source.ID, c.cfg.Now().UTC(), nil, 0
	dir, err := c.Begin(ctx, s)
	if err != nil {
		return cube.Snapshot{}, err
	}
	to := c.copyOf(dir)
	err = c.cfg.Pool.Link(ctx, img.RootPath, to(rootFile))
	for _, f := range []struct{ from, name string }{{img.LayerPath, layerFile}, {img.MemoryPath, memoryFile}, {img.StatePath, stateFile}} {
		if err == nil {
			err = c.cfg.Pool.Clone(ctx, f.from, to(f.name))
		}
	}
	if err == nil {
		img.SnapshotID = id
		s, err = c.Publish(ctx, s, img)
	}
	if err != nil {
		return cube.Snapshot{}, errors.Join(err, c.Discard(context.WithoutCancel(ctx), id))
	}
	return s, nil
}

func (c *Catalogue) copyOf(dir string) func(string) string {
	return func(name string) string { return filepath.Join(dir, name) }
}

// Export implements cube.Snapshots.
func (c *Catalogue) Export(context.Context, string, io.Writer, func(cube.TransferProgress)) error {
	return cube.Errorf(cube.CodeUnimplemented, "the export of snapshots is not built yet")
}

// Import implements cube.Snapshots.
func (c *Catalogue) Import(context.Context, io.Reader, string, func(cube.TransferProgress)) (cube.Snapshot, error) {
	return cube.Snapshot{}, cube.Errorf(cube.CodeUnimplemented, "the import of snapshots is not built yet")
}

var _ cube.Snapshots = (*Catalogue)(nil)
