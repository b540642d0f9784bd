package runc

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/launch"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// Claim takes a slot for the owner, a waiting one or one made now, and applies the
// limits. The claim is on record before Claim returns. MemoryBytes and PIDs must be
// set; MilliCPUs of 0 leaves the processors unlimited. Codes: AlreadyExists,
// ResourceExhausted (no user ID is left), Invalid, Unavailable after Close.
func (s *Slots) Claim(ctx context.Context, owner string, l vmm.Limits) (vmm.Instance, error) {
	if owner == "" || strings.ContainsAny(owner, "/\x00") {
		return vmm.Instance{}, cube.InvalidField("owner", "%q is no name", owner)
	}
	if l.MemoryBytes <= 0 || l.PIDs <= 0 || l.MilliCPUs < 0 {
		return vmm.Instance{}, cube.InvalidField("limits", "memory and PIDs must be limited: %+v", l)
	}
	end, err := s.beginClaim(owner)
	if err != nil {
		return vmm.Instance{}, err
	}
	sl, err := s.claimSlot(ctx, owner, l)
	end(sl)
	if err != nil {
		return vmm.Instance{}, fmt.Errorf("claim VMM slot for %s: %w", owner, err)
	}
	return sl.instance(), nil
}

// beginClaim reserves the owner's name. The function that it returns publishes the
// slot, or gives the name back when there is none.
func (s *Slots) beginClaim(owner string) (end func(*slot), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return nil, cube.Errorf(cube.CodeUnavailable, "the node is stopping")
	case s.owners[owner] != nil, s.claims[owner] != nil:
		return nil, cube.Errorf(cube.CodeAlreadyExists, "%s already has a VMM slot", owner)
	}
	ended := make(chan struct{})
	s.claims[owner] = ended
	return func(sl *slot) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if sl != nil {
			s.owners[owner] = sl
		}
		delete(s.claims, owner)
		close(ended)
	}, nil
}

func (s *Slots) claimSlot(ctx context.Context, owner string, l vmm.Limits) (*slot, error) {
	sl, err := s.take(ctx)
	if err != nil {
		return nil, err
	}
	sl.owner = owner
	err = writeRecord(sl.dir, sl.instance())
	if err == nil {
		err = applyLimits(s.jail.cgroupPath(sl.name), l)
	}
	if err != nil {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		return nil, errors.Join(err, s.destroy(undo, sl))
	}
	return sl, nil
}

// take removes a living slot from the waiting ones, or makes one.
func (s *Slots) take(ctx context.Context) (*slot, error) {
	for {
		s.mu.Lock()
		var sl *slot
		if n := len(s.waiting); n > 0 {
			sl = s.waiting[0]
			s.waiting = s.waiting[1:]
			s.claimed = time.Now()
		} else {
			s.user++
		}
		s.mu.Unlock()
		if sl == nil {
			break
		}
		s.poke()
		if alive(sl.process) {
			return sl, nil
		}
		s.cfg.Log.Warn("a waiting VMM slot died", "slot", sl.name)
		s.discard(ctx, sl)
	}
	defer func() {
		s.mu.Lock()
		s.user--
		s.mu.Unlock()
		s.poke()
	}()
	return s.create(ctx)
}

func (s *Slots) discard(ctx context.Context, sl *slot) {
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if err := s.destroy(undo, sl); err != nil {
		s.cfg.Log.Error("remove dead VMM slot", "slot", sl.name, "error", err)
	}
}

// Launch makes the owner's waiting launcher execve args[0] with files[i] as file
// descriptor i, and returns when the execve succeeded. The files stay the caller's.
// A slot can be launched once. Codes: NotFound, FailedPrecondition (launched before).
func (s *Slots) Launch(ctx context.Context, owner string, args, env []string, files []*os.File) error {
	sl, err := s.lookup(owner)
	if err != nil {
		return err
	}
	err = launch.Send(ctx, sl.socket(), args, env, files)
	if errors.Is(err, os.ErrNotExist) && alive(sl.process) {
		return cube.Errorf(cube.CodeFailedPrecondition, "the VMM slot of %s is launched already", owner)
	}
	if err != nil {
		return fmt.Errorf("launch in slot of %s: %w", owner, err)
	}
	return nil
}

// List returns every claimed slot, also those claimed by an earlier daemon. One whose
// process is gone, but which is not destroyed yet, has a zero Process.
func (s *Slots) List(context.Context) ([]vmm.Instance, error) {
	s.mu.Lock()
	list := make([]vmm.Instance, 0, len(s.owners))
	for _, sl := range s.owners {
		list = append(list, sl.instance())
	}
	s.mu.Unlock()
	for i := range list {
		if !alive(list[i].Process) {
			list[i].Process = vmm.Process{}
		}
	}
	return list, nil
}

func (s *Slots) lookup(owner string) (*slot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sl := s.owners[owner]
	if sl == nil {
		return nil, cube.Errorf(cube.CodeNotFound, "%s has no VMM slot", owner)
	}
	return sl, nil
}
