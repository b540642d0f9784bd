package agent

import (
	"sync"
	"time"
)

// procs is the table of the processes: those that run, and for keepEnded those that
// have ended.
type procs struct {
	mu    sync.Mutex
	byPID map[int]*process
}

func (t *procs) init() { t.byPID = map[int]*process{} }

// add enters a process; an ended one with the same PID gives way.
func (t *procs) add(p *process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.purge()
	t.byPID[p.pid] = p
}

// purge forgets what ended long ago. t.mu is held.
func (t *procs) purge() {
	for pid, p := range t.byPID {
		if e := p.hub.ended(); e != nil && time.Since(e.at) > keepEnded {
			delete(t.byPID, pid)
		}
	}
}

// find returns the process that match accepts, one that runs before one that ended.
func (t *procs) find(match func(*process) bool) *process {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.purge()
	var found *process
	for _, p := range t.byPID {
		if !match(p) {
			continue
		}
		found = p
		if p.hub.ended() == nil {
			break
		}
	}
	return found
}

// running returns the processes that have not ended.
func (t *procs) running() []*process {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.purge()
	var all []*process
	for _, p := range t.byPID {
		if p.hub.ended() == nil {
			all = append(all, p)
		}
	}
	return all
}
