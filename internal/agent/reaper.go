package agent

import (
	"errors"
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// reaper is the only place of the agent that waits for children. As PID 1 it collects
// every child, also the orphans it inherits, without taking the exit status of a process
// that somebody waits for.
//
// A child is forked and registered under mu, and children are collected under mu too.
// So a status is never collected before its owner is known, and a PID that is reused
// right after an orphan was collected cannot be mistaken for the orphan's.
type reaper struct {
	all bool // collect every child, not only the registered ones

	mu   sync.Mutex
	kids map[int]func(syscall.WaitStatus)

	signals chan os.Signal
	stopped chan struct{}
	// orphans is called, without mu, after orphans were collected. May be nil.
	orphans func()
}

func newReaper(all bool, orphans func()) *reaper {
	r := &reaper{
		all:     all,
		orphans: orphans,
		kids:    map[int]func(syscall.WaitStatus){},
		signals: make(chan os.Signal, 1),
		stopped: make(chan struct{}),
	}
	signal.Notify(r.signals, syscall.SIGCHLD)
	go r.run()
	return r
}

// close stops collecting. Children that still run are left alone.
func (r *reaper) close() {
	signal.Stop(r.signals)
	close(r.signals)
	<-r.stopped
}

func (r *reaper) run() {
	defer close(r.stopped)
	for range r.signals {
		r.collect()
	}
}

// start forks a child with fork and calls exited, from another goroutine, once with its
// exit status.
func (r *reaper) start(fork func() (int, error), exited func(syscall.WaitStatus)) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	pid, err := fork()
	if err != nil {
		return 0, err
	}
	r.kids[pid] = exited
	return pid, nil
}

// signal sends sig to a child that is not yet collected, so that the PID still means it.
// A negative pid means the child's process group.
func (r *reaper) signal(pid int, sig syscall.Signal) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	child := pid
	if child < 0 {
		child = -child
	}
	if _, ok := r.kids[child]; !ok {
		return syscall.ESRCH
	}
	return syscall.Kill(pid, sig)
}

type exitOf struct {
	exited func(syscall.WaitStatus)
	status syscall.WaitStatus
}

func (r *reaper) collect() {
	r.mu.Lock()
	var exits []exitOf
	orphans := false
	if r.all {
		exits, orphans = r.collectAll()
	} else {
		exits = r.collectKnown()
	}
	r.mu.Unlock()
	for _, e := range exits {
		e.exited(e.status)
	}
	if orphans && r.orphans != nil {
		r.orphans()
	}
}

func (r *reaper) collectAll() (exits []exitOf, orphans bool) {
	for {
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return exits, orphans
		}
		exited, ok := r.kids[pid]
		if !ok {
			orphans = true
			continue
		}
		delete(r.kids, pid)
		exits = append(exits, exitOf{exited, ws})
	}
}

func (r *reaper) collectKnown() []exitOf {
	var exits []exitOf
	for pid, exited := range r.kids {
		var ws syscall.WaitStatus
		got, err := syscall.Wait4(pid, &ws, syscall.WNOHANG, nil)
		if err == nil && got == pid {
			delete(r.kids, pid)
			exits = append(exits, exitOf{exited, ws})
		}
	}
	return exits
}
