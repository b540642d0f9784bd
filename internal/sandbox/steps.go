package sandbox

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/cubesandbox/cubelet/internal/flow"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// entropyBytes is how much host randomness each restored guest is given.
const entropyBytes = 64

// effects is what the steps of one create hand to each other and to the record.
type effects struct {
	tap      *os.File
	instance vmm.Instance
}

// close releases what the steps held only for each other.
func (e *effects) close() {
	if e.tap != nil {
		e.tap.Close()
		e.tap = nil
	}
}

// steps is the only list of what a sandbox consists of. Create runs it; delete and
// recovery unwind it, with effects that nobody reads.
func (m *Manager) steps(r *Record, e *effects) []flow.Stage {
	id, owner, p, d := r.ID, r.vmm(), &r.Plan, &m.cfg
	return []flow.Stage{
		{
			{
				Name: "vmm-slot",
				Do: func(ctx context.Context) error {
					_, err := d.VMMs.Claim(ctx, owner, p.Limits)
					return err
				},
				Undo: func(ctx context.Context) error {
					// The next generation's is there when a verb could not be unwound.
					next := vmmOwner(id, r.Generation+1)
					return errors.Join(d.VMMs.Destroy(ctx, owner), d.VMMs.Destroy(ctx, next))
				},
			},
			{
				Name: "network",
				Do: func(ctx context.Context) (err error) {
					e.tap, err = d.Network.Claim(ctx, id, r.Spec.Network)
					return err
				},
				Undo: func(ctx context.Context) error { return d.Network.Release(ctx, id) },
			},
			{
				Name: "disk",
				Do: func(ctx context.Context) error {
					dir, err := d.Disks.Create(ctx, id)
					if err != nil {
						return err
					}
					if dir != p.Dir {
						return fmt.Errorf("directory is %s, planned %s", dir, p.Dir)
					}
					// A name of its own keeps the root disk when its template is deleted.
					if err := d.Disks.Link(ctx, p.Image.RootPath, p.Machine.Disks[0].Path); err != nil {
						return err
					}
					return d.Disks.Clone(ctx, p.Image.LayerPath, p.LayerPath)
				},
				Undo: func(ctx context.Context) error { return d.Disks.Remove(ctx, id) },
			},
		},
		{{
			Name: "restore",
			Do: func(ctx context.Context) (err error) {
				e.instance, err = d.VMMs.Launch(ctx, owner, p.Machine, e.tap)
				return err
			},
			// The VMM is gone before its disk and its network are.
			Undo: func(ctx context.Context) error { return d.VMMs.Destroy(ctx, owner) },
		}},
		{{Name: "agent", Do: func(ctx context.Context) error { return m.initGuest(ctx, r) }}},
	}
}

// initGuest tells the guest's agent which sandbox it is, with the time and fresh entropy.
func (m *Manager) initGuest(ctx context.Context, r *Record) error {
	entropy := make([]byte, entropyBytes)
	rand.Read(entropy) // never fails, see its documentation
	return m.cfg.Guest.Init(ctx, m.dialer(r.ID), r.Plan.init(r.ID, m.cfg.Now(), entropy))
}

// dialer opens connections to the guest's ports from inside its namespace.
func (m *Manager) dialer(id string) Dialer {
	return func(ctx context.Context, port int) (net.Conn, error) {
		return m.cfg.Network.Dial(ctx, id, port)
	}
}
