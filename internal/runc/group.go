package runc

import (
	"context"
	"crypto/rand"
	"sync"
)

// groupSize is the number of slots that share one shim. A shim of its own costs each
// slot 4 MB; one for all means that its death takes every VM of the node along.
const groupSize = 16

// groups assigns slots to shims. A shim ends itself when its last container is
// deleted; a container that is being made at that moment in the same group is lost
// (its shim is gone, or the socket is removed under it). So:
//   - while a group has no living member, only the one create that founds it may run;
//   - the delete of a group's last living member first closes the group to newcomers
//     and then waits for the creates that run in it.
//
// Groups of an earlier daemon are not in here: no create joins them.
type groups struct {
	mu   sync.Mutex
	open []*group
}

type group struct {
	id       string
	live     int           // members that are made and not being deleted
	creating int           // members that are being made
	idle     chan struct{} // closed when creating reaches 0; nil when nobody waits
}

// join returns a group for one slot that is about to be made: one with room, or a new
// one. The caller reports the outcome with joined.
func (g *groups) join(fresh bool) *group {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !fresh {
		for _, gr := range g.open {
			if gr.live > 0 && gr.live+gr.creating < groupSize {
				gr.creating++
				return gr
			}
		}
	}
	gr := &group{id: "g-" + rand.Text()[:13], creating: 1}
	g.open = append(g.open, gr)
	return gr
}

// joined ends a create.
func (g *groups) joined(gr *group, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	gr.creating--
	if ok {
		gr.live++
	}
	if gr.creating == 0 && gr.idle != nil {
		close(gr.idle)
		gr.idle = nil
	}
	if gr.live+gr.creating == 0 {
		g.close(gr)
	}
}

// leave must be called once before a member's task is deleted. A nil group is that of
// an earlier daemon.
func (g *groups) leave(ctx context.Context, gr *group) error {
	if gr == nil {
		return nil
	}
	g.mu.Lock()
	gr.live--
	if gr.live > 0 {
		g.mu.Unlock()
		return nil
	}
	g.close(gr)
	if gr.creating == 0 {
		g.mu.Unlock()
		return nil
	}
	if gr.idle == nil {
		gr.idle = make(chan struct{})
	}
	idle := gr.idle
	g.mu.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		// The member is still there, and the caller comes again.
		g.mu.Lock()
		gr.live++
		g.mu.Unlock()
		return ctx.Err()
	}
}

// close takes a group from the list, so that nobody joins it any more. mu is held.
func (g *groups) close(gr *group) {
	for i, o := range g.open {
		if o == gr {
			g.open = append(g.open[:i], g.open[i+1:]...)
			return
		}
	}
}
