package sandbox

import (
	"context"

	cube "github.com/cubesandbox/cubelet"
)

// settled reports whether nothing is being done to a sandbox in this phase, so that its
// record and the host must agree.
func settled(p cube.Phase) bool {
	switch p {
	case cube.PhaseRunning, cube.PhasePaused, cube.PhaseStopped, cube.PhaseFailed:
		return true
	case cube.PhaseCreating, cube.PhasePausing, cube.PhaseResuming, cube.PhaseStopping, cube.PhaseDeleting:
		return false
	}
	return false
}

// Check compares the records with the host and lists what does not fit. Owners in busy
// (template builds) and sandboxes that are being created or deleted are left out.
func (m *Manager) Check(ctx context.Context, busy func(owner string) bool) ([]cube.Finding, error) {
	seen, err := m.observe(ctx)
	if err != nil {
		return nil, err
	}
	// The records are read after the host: what was made in between is in them, and
	// what was deleted in between is judged again below.
	records := map[string]Record{}
	m.mu.Lock()
	for id, d := range m.drivers {
		r := d.rec.Load()
		if r == nil {
			r = &Record{ID: id, Phase: cube.PhaseCreating} // before its first record
		}
		records[id] = *r
	}
	m.mu.Unlock()
	again, err := m.observe(ctx)
	if err != nil {
		return nil, err
	}
	var findings []cube.Finding
	for _, a := range reconcile(records, seen) {
		r, known := records[a.ID]
		switch {
		case a.Kind == ActionRemove && (busy(a.ID) || !again.has(a.ID)):
		case a.Kind == ActionRemove:
			findings = append(findings, cube.Finding{Part: "sandboxes", Object: a.ID, Detail: "the host has objects of it, the journal has no record"})
		case a.Kind == ActionFail && known && settled(r.Phase) && m.still(a.ID, r.Phase):
			findings = append(findings, cube.Finding{Part: "sandboxes", Object: a.ID, Detail: a.Reason})
		}
	}
	return findings, nil
}

// still reports whether a sandbox exists and is in the phase.
func (m *Manager) still(id string, p cube.Phase) bool {
	m.mu.Lock()
	d, ok := m.drivers[id]
	m.mu.Unlock()
	if !ok {
		return false
	}
	r := d.rec.Load()
	return r != nil && r.Phase == p
}

// IDs lists the sandboxes, also those whose first record is not written yet.
func (m *Manager) IDs() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	ids := make([]string, 0, len(m.drivers))
	for id := range m.drivers {
		ids = append(ids, id)
	}
	return ids
}

func (o Observed) has(owner string) bool {
	_, vm := o.VMMs[owner]
	return vm || o.Networks[owner] || o.Disks[owner]
}

// Settled lists the sandboxes to which nothing is being done.
func (m *Manager) Settled() []cube.Sandbox {
	var all []cube.Sandbox
	for _, r := range m.records() {
		if settled(r.Phase) {
			all = append(all, r.sandbox())
		}
	}
	return all
}
