package networkagent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"sync"

	cube "github.com/cubesandbox/cubelet"
)

// claim is an owner's hold on a slot.
type claim struct {
	settled chan struct{} // closed when the claim succeeded or failed
	record  record        // constant once settled
	adopted bool          // made by an earlier daemon

	releasing sync.Mutex // serialises releases of this claim

	mu    sync.Mutex
	gone  bool // no connection may be added any more
	conns map[*conn]struct{}
}

func pending() *claim { return &claim{settled: make(chan struct{}), conns: map[*conn]struct{}{}} }

// settled is the claim of a record found on disk.
func settled(r record) *claim {
	c := pending()
	c.record, c.adopted = r, true
	close(c.settled)
	return c
}

// Claim takes a network slot for the owner, a prepared one or one made now, and sets
// the addresses of the spec. The caller closes the tap; the device stays. Codes:
// Invalid, AlreadyExists when the owner has a slot, ResourceExhausted, Unavailable
// after Close, those of ctx.
func (a *Agent) Claim(ctx context.Context, owner string, spec cube.NetworkSpec) (*os.File, error) {
	gateway, guest, err := a.plan(owner, spec)
	if err != nil {
		return nil, err
	}
	c, s, err := a.begin(owner)
	if err != nil {
		return nil, err
	}
	defer close(c.settled)
	defer a.wake()
	if s == nil {
		if s, err = a.makeSlot(ctx); err != nil {
			a.drop(owner, c)
			return nil, fmt.Errorf("claim network slot of %s: %w", owner, err)
		}
	}
	if err := a.assign(owner, c, s, gateway, guest); err != nil {
		return nil, errors.Join(err, s.tap.Close(), a.undo(owner, c))
	}
	return s.tap, nil
}

// plan checks a claim before it has any effect.
func (a *Agent) plan(owner string, spec cube.NetworkSpec) (gateway, guest netip.Prefix, err error) {
	if err := checkOwner(owner); err != nil {
		return gateway, guest, err
	}
	if gateway, guest, err = spec.Addresses(); err != nil {
		return gateway, guest, err
	}
	if spec.CIDR != "" && gateway.Overlaps(a.prefix) {
		return gateway, guest, cube.InvalidField("network.cidr", "%s overlaps %s, which connects sandboxes to this node", gateway.Masked(), a.prefix)
	}
	return gateway, guest, nil
}

// begin enters a pending claim and takes a waiting slot for it, if there is one.
func (a *Agent) begin(owner string) (*claim, *slot, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil, nil, cube.Errorf(cube.CodeUnavailable, "the network agent is closed")
	}
	if a.owners[owner] != nil {
		return nil, nil, &cube.Error{Code: cube.CodeAlreadyExists, Op: "claim network slot", ID: owner}
	}
	c := pending()
	a.owners[owner] = c
	if len(a.waiting) == 0 {
		return c, nil, nil
	}
	s := a.waiting[0]
	a.waiting = slices.Delete(a.waiting, 0, 1)
	return c, s, nil
}

func (a *Agent) assign(owner string, c *claim, s *slot, gateway, guest netip.Prefix) error {
	_, usual := defaultAddresses()
	c.record = record{Slot: s.name, Guests: []netip.Addr{usual.Addr()}}
	if guest != usual {
		c.record.Guests = append(c.record.Guests, guest.Addr())
	}
	if err := a.records.put(owner, c.record); err != nil {
		return err
	}
	if guest == usual {
		return nil
	}
	return a.shop.readdress(s.name, gateway, guest)
}

// undo takes back a claim that failed. What cannot be taken back stays the owner's, so
// that Release tries again.
func (a *Agent) undo(owner string, c *claim) error {
	if err := a.tearDown(owner, c); err != nil {
		return err
	}
	a.drop(owner, c)
	return nil
}

func (a *Agent) tearDown(owner string, c *claim) error {
	c.hangUp()
	if c.record.Slot != "" {
		if err := a.destroy(c.record.Slot); err != nil {
			return err
		}
	}
	// The record goes last: with it a restarted daemon knows whose the rest is.
	return a.records.remove(owner)
}

func (a *Agent) drop(owner string, c *claim) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.owners[owner] == c {
		delete(a.owners, owner)
	}
}

// Release destroys the owner's slot and closes the connections dialled through it; the
// slot is never used again. It waits for a claim that is under way and succeeds when
// there is nothing to release. The namespace ends when its tap is closed everywhere.
func (a *Agent) Release(ctx context.Context, owner string) error {
	a.mu.Lock()
	c := a.owners[owner]
	a.mu.Unlock()
	if c == nil {
		return nil
	}
	select {
	case <-c.settled:
	case <-ctx.Done():
		return ctx.Err()
	}
	c.releasing.Lock()
	defer c.releasing.Unlock()
	a.mu.Lock()
	current := a.owners[owner] == c
	a.mu.Unlock()
	if !current {
		return nil
	}
	if err := a.undo(owner, c); err != nil {
		return fmt.Errorf("release network slot of %s: %w", owner, err)
	}
	return nil
}

// List returns the owners of claimed slots, also those claimed by an earlier daemon and
// those whose slot did not survive.
func (a *Agent) List(context.Context) ([]string, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Sorted(maps.Keys(a.owners)), nil
}

// lookUp returns the owner's claim once it is made. CodeNotFound when there is none.
func (a *Agent) lookUp(owner string) (*claim, error) {
	a.mu.Lock()
	c := a.owners[owner]
	a.mu.Unlock()
	if c != nil {
		select {
		case <-c.settled:
			return c, nil
		default: // not handed out yet
		}
	}
	return nil, &cube.Error{Code: cube.CodeNotFound, Op: "find network slot", ID: owner}
}
