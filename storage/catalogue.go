package storage

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/tplimage"
)

// CatalogueConfig configures a Catalogue. Every field is required.
type CatalogueConfig struct {
	Pool    *Pool
	Records SnapshotRecords
	Machine cube.MachineInfo // what this node's snapshots are made with
	Log     *slog.Logger
	Now     func() time.Time
}

// SnapshotRecords is the journal of which snapshots there are. Every method returns
// after the data is on disk.
type SnapshotRecords interface {
	Load(ctx context.Context) (map[string]SnapshotRecord, error)
	Put(ctx context.Context, r SnapshotRecord) error
	Delete(ctx context.Context, id string) error
}

// SnapshotRecord is what the journal holds of a snapshot. The rest is in its manifest.
type SnapshotRecord struct {
	ID    string        `json:"id"`
	Name  string        `json:"name,omitempty"`
	State SnapshotState `json:"state"`
}

// SnapshotState tells how far a snapshot is.
type SnapshotState string

// The states. A snapshot exists for others only while it is ready.
const (
	SnapshotMaking   SnapshotState = "making"   // journaled before its directory is made
	SnapshotReady    SnapshotState = "ready"    // journaled after all of it is on the disk
	SnapshotDeleting SnapshotState = "deleting" // journaled before the first file is removed
)

// Catalogue keeps the snapshots, each in a directory of its own with all that it needs:
// its blocks are shared with other files by reflink and its root disk by a hard link, so
// that nothing it came from has to stay. It implements the engine's Snapshots and
// cube.Snapshots.
type Catalogue struct {
	cfg CatalogueConfig

	mu    sync.Mutex // never held over I/O
	all   map[string]*entry
	users map[string]map[string]bool // also of snapshots that are gone
}

type entry struct {
	record   SnapshotRecord
	manifest manifest // when ready
	broken   error    // why a ready one cannot be used
}

// OpenCatalogue loads the snapshots and puts in order what a crash left: one that was
// being made is removed, and so is one that was being deleted.
func OpenCatalogue(ctx context.Context, cfg CatalogueConfig) (*Catalogue, error) {
	c := &Catalogue{cfg: cfg, all: map[string]*entry{}, users: map[string]map[string]bool{}}
	records, err := cfg.Records.Load(ctx)
	if err != nil {
		return nil, fmt.Errorf("load snapshots: %w", err)
	}
	dirs, err := os.ReadDir(cfg.Pool.SnapshotsDir())
	if err != nil {
		return nil, fmt.Errorf("list snapshots: %w", err)
	}
	for _, e := range dirs {
		if r, ok := records[e.Name()]; ok && r.State == SnapshotReady {
			continue
		}
		cfg.Log.Info("removing what is left of a snapshot", "snapshot", e.Name())
		if err := c.remove(ctx, e.Name()); err != nil {
			return nil, err
		}
	}
	for id, r := range records {
		if r.State != SnapshotReady {
			if err := cfg.Records.Delete(ctx, id); err != nil {
				return nil, fmt.Errorf("forget snapshot %s: %w", id, err)
			}
			continue
		}
		m, err := readManifest(c.dir(id))
		if err != nil {
			cfg.Log.Error("a snapshot cannot be used", "snapshot", id, "err", err)
		}
		c.all[id] = &entry{record: r, manifest: m, broken: err}
	}
	return c, nil
}

func (c *Catalogue) dir(id string) string { return filepath.Join(c.cfg.Pool.SnapshotsDir(), id) }

func (c *Catalogue) remove(ctx context.Context, name string) error {
	if err := c.cfg.Pool.removeTree(ctx, snapshotsName, name); err != nil {
		return fmt.Errorf("remove files of snapshot %s: %w", name, err)
	}
	return nil
}

var (
	snapshotID   = regexp.MustCompile(`^snap-[a-z0-9]{5,40}$`)
	snapshotName = regexp.MustCompile(`^[a-z0-9][a-z0-9.-]{0,62}$`)
)

// Begin implements the engine's interface: it journals a snapshot that is being made and
// then makes its directory. After an error there is neither. Codes: Invalid,
// AlreadyExists, NoSpace.
func (c *Catalogue) Begin(ctx context.Context, s cube.Snapshot) (dir string, err error) {
	if err := c.reserve(s.ID, s.Name); err != nil {
		return "", &cube.Error{Code: cube.CodeOf(err), Op: "make snapshot", ID: s.ID, Err: err}
	}
	err = c.cfg.Records.Put(ctx, SnapshotRecord{ID: s.ID, Name: s.Name, State: SnapshotMaking})
	if err == nil {
		err = c.cfg.Pool.fs.Mkdir(c.dir(s.ID), 0o700)
	}
	if err != nil {
		err = errors.Join(err, c.Discard(context.WithoutCancel(ctx), s.ID))
		return "", fmt.Errorf("make snapshot %s: %w", s.ID, err)
	}
	return c.dir(s.ID), nil
}

// reserve takes an ID and a name.
func (c *Catalogue) reserve(id, name string) error {
	switch {
	case !snapshotID.MatchString(id):
		return cube.InvalidField("id", "%q does not have the form snap-[a-z0-9]{5,40}", id)
	case name != "" && !snapshotName.MatchString(name):
		return cube.InvalidField("name", "%q is not a name of a-z, 0-9, . and -, 63 at most", name)
	case snapshotID.MatchString(name):
		return cube.InvalidField("name", "%q looks like an ID", name)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.all[id] != nil {
		return cube.Errorf(cube.CodeAlreadyExists, "there is a snapshot of this ID")
	}
	for other, e := range c.all {
		if name != "" && e.record.Name == name {
			return cube.Errorf(cube.CodeAlreadyExists, "snapshot %s has the name %q", other, name).WithHint("delete it or choose another name")
		}
	}
	c.all[id] = &entry{record: SnapshotRecord{ID: id, Name: name, State: SnapshotMaking}}
	return nil
}

// Publish implements the engine's interface: it makes the files durable, then the
// manifest, then the journal's entry, and only then the snapshot visible. The image's
// files lie in the directory that Begin made.
func (c *Catalogue) Publish(ctx context.Context, s cube.Snapshot, img tplimage.Image) (cube.Snapshot, error) {
	s.Machine, s.Users, s.Usage = c.cfg.Machine, nil, cube.Usage{}
	m := manifest{Version: manifestVersion, Snapshot: s, Image: img}
	if err := m.seal(ctx, c.cfg.Pool, c.dir(s.ID)); err != nil {
		return s, fmt.Errorf("publish snapshot %s: %w", s.ID, err)
	}
	r := SnapshotRecord{ID: s.ID, Name: s.Name, State: SnapshotReady}
	if err := c.cfg.Records.Put(ctx, r); err != nil {
		return s, fmt.Errorf("journal snapshot %s: %w", s.ID, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all[s.ID] = &entry{record: r, manifest: m}
	return s, nil
}

// Discard implements the engine's interface: it undoes Begin.
func (c *Catalogue) Discard(ctx context.Context, id string) error {
	if !snapshotID.MatchString(id) {
		return cube.Errorf(cube.CodeInvalid, "%q is no snapshot's ID", id)
	}
	if err := c.remove(ctx, id); err != nil {
		return err
	}
	if err := c.cfg.Records.Delete(ctx, id); err != nil {
		return fmt.Errorf("forget snapshot %s: %w", id, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.all, id)
	return nil
}

// Acquire implements the engine's interface.
func (c *Catalogue) Acquire(_ context.Context, ref, user string) (cube.Snapshot, tplimage.Image, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, err := c.find(ref)
	if err == nil {
		err = e.usable(c.cfg.Machine)
	}
	if err != nil {
		return cube.Snapshot{}, tplimage.Image{}, err
	}
	id := e.record.ID
	c.hold(id, user)
	return c.render(e), e.manifest.image(c.dir(id)), nil
}

// usable says why a snapshot cannot be restored here, naming both sides.
func (e *entry) usable(here cube.MachineInfo) error {
	if e.broken != nil {
		return cube.Errorf(cube.CodeFailedPrecondition, "snapshot %s is damaged: %w", e.record.ID, e.broken)
	}
	if there := e.manifest.Snapshot.Machine; there != here {
		return cube.Errorf(cube.CodeFailedPrecondition, "snapshot %s was made for another machine: it needs %+v, this node has %+v", e.record.ID, there, here).
			WithHint("use it on a node like the one that it was made on")
	}
	return nil
}

// Hold implements the engine's interface.
func (c *Catalogue) Hold(id, user string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hold(id, user)
}

func (c *Catalogue) hold(id, user string) {
	if c.users[id] == nil {
		c.users[id] = map[string]bool{}
	}
	c.users[id][user] = true
}

// Release implements the engine's interface.
func (c *Catalogue) Release(id, user string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.users[id], user)
	if len(c.users[id]) == 0 {
		delete(c.users, id)
	}
}

// find resolves a reference to a ready snapshot. It is called with mu held.
func (c *Catalogue) find(ref string) (*entry, error) {
	if ref == "" {
		return nil, cube.InvalidField("snapshot_id", "is required")
	}
	var found []*entry
	for id, e := range c.all {
		switch {
		case e.record.State != SnapshotReady:
		case id == ref || e.record.Name == ref:
			return e, nil
		case strings.HasPrefix(id, ref):
			found = append(found, e)
		}
	}
	switch len(found) {
	case 0:
		return nil, &cube.Error{Code: cube.CodeNotFound, ID: ref, Err: errors.New("no such snapshot")}
	case 1:
		return found[0], nil
	}
	return nil, cube.InvalidField("snapshot_id", "%q is the beginning of several IDs", ref).WithHint("give more of the ID")
}

// render returns what others see of a snapshot. It is called with mu held.
func (c *Catalogue) render(e *entry) cube.Snapshot {
	s := e.manifest.Snapshot
	s.ID, s.Name = e.record.ID, e.record.Name
	s.Users = slices.Sorted(maps.Keys(c.users[s.ID]))
	return s
}

// IDs lists the snapshots, also those that are being made or deleted.
func (c *Catalogue) IDs() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Sorted(maps.Keys(c.all))
}
