package sandbox

import (
	"context"
	"net"

	cube "github.com/cubesandbox/cubelet"
)

// running returns the record of a sandbox whose guest can be talked to.
func (m *Manager) running(ref string) (*Record, error) {
	d, err := m.find(ref)
	if err != nil {
		return nil, err
	}
	r := d.record()
	if r.Phase != cube.PhaseRunning {
		e := cube.Errorf(cube.CodeFailedPrecondition, "it is %s, not running", r.Phase)
		e.Op, e.ID = "sandbox", r.ID
		if r.Reason != "" {
			return nil, e.WithHint("%s", r.Reason)
		}
		return nil, e
	}
	return r, nil
}

// Exec implements cube.Sandboxes.
func (m *Manager) Exec(ctx context.Context, ref string, spec cube.ExecSpec) (cube.ExecSession, error) {
	r, err := m.running(ref)
	if err != nil {
		return nil, err
	}
	return m.cfg.Guest.Exec(ctx, m.dialer(r.ID), r.Plan.Guest.AccessToken, spec)
}

// DialGuest implements cube.Sandboxes.
func (m *Manager) DialGuest(ctx context.Context, ref string, port int) (net.Conn, string, error) {
	r, err := m.running(ref)
	if err != nil {
		return nil, "", err
	}
	conn, err := m.cfg.Network.Dial(ctx, r.ID, port)
	if err != nil {
		return nil, "", err
	}
	if port != cube.AgentPort {
		return conn, "", nil
	}
	return conn, r.Plan.Guest.AccessToken, nil
}
