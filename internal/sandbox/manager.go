// Package sandbox is the engine: it owns every sandbox's whole life.
//
// The Manager keeps one driver per sandbox; the driver's goroutine alone changes its
// sandbox. What a sandbox will be is decided by pure functions (plan, reconcile) and
// carried out by flow steps over the interfaces of deps.go.
package sandbox

import (
	"context"
	"crypto/rand"
	"encoding/base32"
	"encoding/hex"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/flow"
)

// Config is what a Manager is made of. Every field is required unless it says otherwise.
type Config struct {
	VMMs      VMMs
	Network   Network
	Disks     Disks
	Templates Templates
	Snapshots Snapshots
	Guest     Guest
	Records   Records
	Node      NodeFacts
	Log       *slog.Logger
	Now       func() time.Time
	// MaxSandboxes bounds how many records the node holds.
	MaxSandboxes int
	// UndoTimeout bounds each unwind.
	UndoTimeout time.Duration
	// VerbTimeout bounds each pause, resume, snapshot and rollback.
	VerbTimeout time.Duration
	// RetryDelete is how long a delete or pause waits that the time to live asked for and
	// that failed.
	RetryDelete time.Duration
	// KeepKeys is how long an idempotency key outlives its sandbox.
	KeepKeys time.Duration
}

// Manager implements cube.Sandboxes.
type Manager struct {
	cfg  Config
	flow flow.Runner
	ctx  context.Context // ends when the manager is closed
	stop context.CancelFunc
	wg   sync.WaitGroup

	// mu guards the maps and closed. It is never held over I/O.
	mu      sync.Mutex
	drivers map[string]*driver
	keys    map[string]keyEntry
	closed  bool
}

// keyEntry is one idempotency key: of a create under way (driver set) or remembered.
type keyEntry struct {
	Key
	driver *driver // nil once the sandbox is gone
}

// New makes a manager without sandboxes; Recover loads those of the journal.
func New(cfg Config) *Manager {
	ctx, stop := context.WithCancel(context.Background())
	return &Manager{
		cfg:     cfg,
		flow:    flow.Runner{UndoTimeout: cfg.UndoTimeout, Now: cfg.Now},
		ctx:     ctx,
		stop:    stop,
		drivers: map[string]*driver{},
		keys:    map[string]keyEntry{},
	}
}

// Close stops the drivers and returns when they are idle. Running sandboxes go on;
// creates under way are unwound.
func (m *Manager) Close() {
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	m.stop()
	m.wg.Wait()
}

// Create implements cube.Sandboxes.
func (m *Manager) Create(ctx context.Context, spec cube.SandboxSpec) (cube.Sandbox, error) {
	if err := validate(spec); err != nil {
		return cube.Sandbox{}, err
	}
	sum, err := digest(spec)
	if err != nil {
		return cube.Sandbox{}, err
	}
	d, err := m.admit(spec, sum)
	if err != nil {
		return cube.Sandbox{}, err
	}
	return d.awaitCreated(ctx)
}

// admit joins the create that has the same idempotency key, or starts a new one.
func (m *Manager) admit(spec cube.SandboxSpec, sum string) (*driver, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, cube.Errorf(cube.CodeUnavailable, "the daemon is shutting down")
	}
	if k, ok := m.keys[spec.IdempotencyKey]; ok && spec.IdempotencyKey != "" {
		return m.join(k, sum)
	}
	if len(m.drivers) >= m.cfg.MaxSandboxes {
		return nil, cube.Errorf(cube.CodeResourceExhausted, "the node holds %d sandboxes, its limit", m.cfg.MaxSandboxes).
			WithHint("delete sandboxes or try again later")
	}
	d := m.newDriver(newID(), spec)
	d.waiters = 1
	m.drivers[d.id] = d
	if spec.IdempotencyKey != "" {
		m.keys[spec.IdempotencyKey] = keyEntry{Key{Digest: sum, SandboxID: d.id}, d}
	}
	m.wg.Go(func() { d.runCreate(spec) })
	return d, nil
}

// join is called with mu held.
func (m *Manager) join(k keyEntry, sum string) (*driver, error) {
	if k.Digest != sum {
		e := cube.Errorf(cube.CodeAlreadyExists, "the key was used for another request, which made sandbox %s", k.SandboxID)
		e.Field = "idempotency_key"
		return nil, e.WithHint("use a new key for a new request")
	}
	if k.driver == nil {
		e := cube.Errorf(cube.CodeFailedPrecondition, "sandbox %s, made with this key, has been deleted", k.SandboxID)
		e.Field = "idempotency_key"
		return nil, e.WithHint("use a new key to make another sandbox")
	}
	k.driver.waiters++
	return k.driver, nil
}

// Get implements cube.Sandboxes.
func (m *Manager) Get(_ context.Context, ref string) (cube.Sandbox, error) {
	d, err := m.find(ref)
	if err != nil {
		return cube.Sandbox{}, err
	}
	return d.record().sandbox(), nil
}

// Delete implements cube.Sandboxes. It wins over everything that is under way.
func (m *Manager) Delete(ctx context.Context, ref string) error {
	d, err := m.find(ref)
	if err != nil {
		return err
	}
	return d.requestDelete(ctx)
}

// find resolves an ID or a unique prefix of one.
func (m *Manager) find(ref string) (*driver, error) {
	if ref == "" {
		return nil, cube.InvalidField("sandbox_id", "is required")
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if d, ok := m.drivers[ref]; ok && d.rec.Load() != nil {
		return d, nil
	}
	var found *driver
	for id, d := range m.drivers {
		if !strings.HasPrefix(id, ref) || d.rec.Load() == nil {
			continue
		}
		if found != nil {
			return nil, cube.InvalidField("sandbox_id", "%q is the beginning of several IDs", ref).WithHint("give more of the ID")
		}
		found = d
	}
	if found == nil {
		return nil, &cube.Error{Code: cube.CodeNotFound, ID: ref, Err: errors.New("no such sandbox")}
	}
	return found, nil
}

// records returns the latest record of every sandbox, oldest first.
func (m *Manager) records() []*Record {
	m.mu.Lock()
	drivers := slices.Collect(maps.Values(m.drivers))
	m.mu.Unlock()
	all := make([]*Record, 0, len(drivers))
	for _, d := range drivers {
		if r := d.rec.Load(); r != nil {
			all = append(all, r)
		}
	}
	slices.SortFunc(all, compareAge)
	return all
}

// Phases counts the sandboxes by phase.
func (m *Manager) Phases() map[cube.Phase]int {
	n := map[cube.Phase]int{}
	for _, r := range m.records() {
		n[r.Phase]++
	}
	return n
}

// forget drops a driver whose sandbox is gone. tombstone keeps its key for a while.
func (m *Manager) forget(d *driver, key string, tombstone Key) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.drivers, d.id)
	switch {
	case key == "":
	case tombstone.SandboxID == "":
		delete(m.keys, key)
	default:
		m.keys[key] = keyEntry{Key: tombstone}
	}
}

// PruneKeys forgets the keys of sandboxes that were deleted longer than KeepKeys ago.
func (m *Manager) PruneKeys(ctx context.Context) error {
	limit := m.cfg.Now().Add(-m.cfg.KeepKeys)
	var old []string
	m.mu.Lock()
	for k, e := range m.keys {
		if e.driver == nil && e.DeletedAt.Before(limit) {
			old = append(old, k)
			delete(m.keys, k)
		}
	}
	m.mu.Unlock()
	if len(old) == 0 {
		return nil
	}
	return m.cfg.Records.DropKeys(ctx, old)
}

// newID draws a sandbox ID: lower-case letters and digits only, since it becomes part
// of host names (<port>-<id>.<domain>), file names and link names.
func newID() string {
	b := make([]byte, 12)
	rand.Read(b) // never fails, see its documentation
	return "s" + strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(b))[:19]
}

func newIdentity(id string) identity {
	b := make([]byte, 48)
	rand.Read(b)
	return identity{ID: id, MachineID: hex.EncodeToString(b[:16]), AccessToken: hex.EncodeToString(b[16:])}
}
