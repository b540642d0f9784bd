package runc

import (
	"context"
	"time"
)

const (
	refillPauseMin = 100 * time.Millisecond
	refillPauseMax = 30 * time.Second

	// refillQuiet is how long after a claim no slot is made while others wait: making one
	// takes a processor for as long as the claim's machine needs to come up.
	refillQuiet = 500 * time.Millisecond
)

// Start begins to keep Target slots waiting, until Close or the end of ctx. One at a
// time, only while no Claim makes a slot, and a while after the last claim: claims come
// first.
func (s *Slots) Start(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.done != nil || s.closed {
		return
	}
	ctx, s.stop = context.WithCancel(ctx)
	s.done = make(chan struct{})
	go s.refill(ctx, s.done)
}

func (s *Slots) refill(ctx context.Context, done chan<- struct{}) {
	defer close(done)
	pause := refillPauseMin
	for {
		wanted, wait := s.wanted()
		if wanted && wait == 0 {
			if err := s.addWaiting(ctx); err == nil {
				pause = refillPauseMin
				continue
			} else if ctx.Err() == nil {
				s.cfg.Log.Warn("refill VMM slots", "error", err, "retryIn", pause)
				wait, pause = pause, min(2*pause, refillPauseMax)
			}
		}
		if !s.sleep(ctx, wait) {
			return
		}
	}
}

// sleep waits for the given time, or for a poke when it is 0. It reports false at the
// end of ctx.
func (s *Slots) sleep(ctx context.Context, d time.Duration) bool {
	if d > 0 {
		select {
		case <-time.After(d):
			return true
		case <-ctx.Done():
			return false
		}
	}
	select {
	case <-s.wake:
		return true
	case <-ctx.Done():
		return false
	}
}

// wanted tells whether a slot is to be made, and how long to wait before.
func (s *Slots) wanted() (bool, time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.user > 0 || len(s.waiting) >= s.cfg.Target {
		return false, 0
	}
	if len(s.waiting) == 0 {
		return true, 0
	}
	return true, max(0, refillQuiet-time.Since(s.claimed))
}

func (s *Slots) addWaiting(ctx context.Context) error {
	sl, err := s.create(ctx)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.waiting = append(s.waiting, sl)
	return nil
}

// poke makes the refill look again.
func (s *Slots) poke() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}
