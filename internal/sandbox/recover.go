package sandbox

import (
	"context"
	"errors"
	"fmt"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// Owners returns the IDs whose host objects recovery will look at: the adapters keep
// these and may destroy everything else that is theirs.
func Owners(records map[string]Record) []string {
	owners := make([]string, 0, len(records))
	for id, r := range records {
		owners = append(owners, id)
		if r.Generation > 0 {
			owners = append(owners, r.vmm())
		}
	}
	return owners
}

// Recover loads the journal, compares it with the host and acts: it is called once,
// before the first request. It returns what it did. One sandbox that cannot be put in
// order does not stop the others; it is failed and says why.
func (m *Manager) Recover(ctx context.Context) ([]Action, error) {
	records, keys, err := m.cfg.Records.Load(ctx)
	if err != nil {
		return nil, fmt.Errorf("load journal: %w", err)
	}
	seen, err := m.observe(ctx)
	if err != nil {
		return nil, err
	}
	actions := reconcile(records, seen)
	m.load(records, keys)
	for _, a := range actions {
		m.cfg.Log.Info("recovery", "sandbox", a.ID, "action", a.Kind, "reason", a.Reason)
		m.act(ctx, a, records[a.ID])
	}
	return actions, nil
}

// observe lists what the host has.
func (m *Manager) observe(ctx context.Context) (Observed, error) {
	seen := Observed{VMMs: map[string]vmm.Instance{}, Networks: map[string]bool{}, Disks: map[string]bool{}}
	vmms, err := m.cfg.VMMs.List(ctx)
	if err != nil {
		return seen, fmt.Errorf("list VMMs: %w", err)
	}
	for _, v := range vmms {
		seen.VMMs[v.Owner] = v
	}
	networks, err := m.cfg.Network.List(ctx)
	if err != nil {
		return seen, fmt.Errorf("list networks: %w", err)
	}
	for _, n := range networks {
		seen.Networks[n] = true
	}
	disks, err := m.cfg.Disks.List(ctx)
	if err != nil {
		return seen, fmt.Errorf("list disks: %w", err)
	}
	for _, d := range disks {
		seen.Disks[d] = true
	}
	return seen, nil
}

// load makes a driver, not yet started, for each record, and takes up the keys.
func (m *Manager) load(records map[string]Record, keys map[string]Key) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for id, r := range records {
		d := m.newDriver(id, r.Spec)
		d.rec.Store(&r)
		d.delivered = true
		d.cancel(nil)
		close(d.created)
		m.drivers[id] = d
		m.hold(&r.Plan.Image, id)
	}
	for key, k := range keys {
		m.keys[key] = keyEntry{Key: k, driver: m.drivers[k.SandboxID]}
	}
}

// act carries out one decision and starts the driver of a sandbox that goes on.
func (m *Manager) act(ctx context.Context, a Action, r Record) {
	if a.Kind == ActionRemove {
		stray := Record{ID: a.ID}
		if err := m.flow.Unwind(ctx, m.steps(&stray, &effects{})); err != nil {
			m.cfg.Log.Error("remove what nobody owns", "owner", a.ID, "err", err)
		}
		return
	}
	m.mu.Lock()
	d := m.drivers[a.ID]
	m.mu.Unlock()
	switch a.Kind {
	case ActionUnwind:
		if m.dropUnfinished(ctx, d) {
			return
		}
	case ActionFinish:
		if err := d.delete(r.Reason); err != nil {
			m.cfg.Log.Error("finish a delete", "sandbox", a.ID, "err", err)
			break
		}
		close(d.gone)
		return
	case ActionFail:
		d.fail(a.Reason + d.consoleTail())
	case ActionAdopt, ActionGoOn:
		// The daemon may have stopped while the machine stood still for a snapshot.
		if err := d.goOn(); err != nil {
			m.cfg.Log.Error("go on with a sandbox", "sandbox", a.ID, "err", err)
		}
	case ActionLetGo:
		d.undoResume()
	case ActionKeep, ActionRemove:
	}
	m.wg.Go(d.serve)
}

// undoResume makes a sandbox paused again whose resume, or whose pause's end, a crash cut
// off. Its memory and its layer are on the disk, untouched.
func (d *driver) undoResume() {
	ctx, cancel := d.undoContext()
	defer cancel()
	r := d.record()
	next := r.Generation + 1
	err := errors.Join(
		d.m.cfg.VMMs.Destroy(ctx, vmmOwner(r.ID, next)),
		d.letGo(),
		d.m.cfg.Disks.Drop(ctx, r.Plan.next(next).LayerPath),
	)
	if r.Phase != cube.PhasePaused {
		err = errors.Join(err, d.put(ctx, func(r *Record) { r.Phase = cube.PhasePaused }))
	}
	if err != nil {
		d.m.cfg.Log.Error("pause a sandbox again", "sandbox", d.id, "err", err)
	}
}

// dropUnfinished unwinds a create that a crash cut off and reports whether nothing of
// it is left. Its key is dropped, so that a retry makes the sandbox anew.
func (m *Manager) dropUnfinished(ctx context.Context, d *driver) bool {
	undoErr := m.flow.Unwind(ctx, m.steps(d.record(), &effects{}))
	img := d.record().Plan.Image
	cause := d.abandon(ctx, errors.New("the daemon stopped while it was being created"), undoErr)
	if r := d.record(); r != nil {
		m.cfg.Log.Error("unwind of an unfinished create", "sandbox", d.id, "err", errors.Join(cause, undoErr))
		return false
	}
	m.release(&img, d.id)
	m.forget(d, d.key, Key{})
	close(d.gone)
	return true
}

var _ cube.Sandboxes = (*Manager)(nil)
