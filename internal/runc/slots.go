// Package runc keeps VMM processes in runc containers. A slot is one container whose
// first process, vmm-launcher, waits to become the VMM; slots are made ahead of time
// and taken over by an owner, a sandbox or a template, in about a millisecond.
// Slots outlive the daemon: containerd's shim is their parent.
package runc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/client"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

const (
	defaultUIDBase  = 64000
	defaultUIDCount = 1500 // ends below 65534, which is nobody

	// undoTimeout bounds the removal of a slot that nobody waits for.
	undoTimeout = 30 * time.Second
)

// Config describes the slots of one node.
type Config struct {
	Client   *client.Client // with a default namespace; stays the caller's
	RunDir   string         // of this boot; the slots' files, by slot
	Launcher string         // path of vmm-launcher, static

	RuncBinary string // path of runc
	RuncRoot   string // of its own, not the host's

	UIDBase  int // first user ID of VMMs (0: 64000), each slot has one of its own
	UIDCount int // size of the range (0: 1500)

	Target int  // waiting slots to keep ready
	KVM    bool // give VMMs /dev/kvm

	Log          *slog.Logger
	CgroupParent string // unique on the host, for example "/cubelet-1a2b"

	// Exits tells how processes ended while no daemon ran, Owner being the slot's
	// name. Wait reports these codes; without them such a process counts as killed.
	Exits []vmm.Exit
}

// Slots are all VMM containers of a node. Methods may be called concurrently.
type Slots struct {
	cfg    Config
	jail   jail
	groups groups
	uids   uids
	making chan struct{} // holds a token for each container that is being made
	wake   chan struct{} // of the refill goroutine
	stop   context.CancelFunc
	done   chan struct{} // closed when the refill goroutine has ended
	exits  map[string]vmm.Exit

	mu      sync.Mutex // held for map accesses only, never across a call
	waiting []*slot
	owners  map[string]*slot
	claims  map[string]chan struct{} // owners whose Claim runs; closed at its end
	foreign []*slot                  // unowned slots of an earlier daemon, until Adopt
	user    int                      // Claims that are making a slot now
	claimed time.Time                // when a waiting slot was taken last
	closed  bool
}

// slot is one container. All fields but gone are fixed once the slot is published.
type slot struct {
	name    string
	dir     string // holds the record (root's) and the directory shared with the container
	uid     int
	group   *group // nil for a slot of an earlier daemon
	owner   string
	process vmm.Process

	busy chan struct{} // holds one token: the right to destroy the slot
	left bool          // the group knows that the task goes; guarded by busy
	gone bool          // guarded by busy
}

func newSlot(runDir, name string, uid int) *slot {
	s := &slot{name: name, dir: filepath.Join(runDir, "slots", name), uid: uid, busy: make(chan struct{}, 1)}
	s.busy <- struct{}{}
	return s
}

// shared is the directory that the container sees, and may write to.
func (s *slot) shared() string { return filepath.Join(s.dir, "cube") }

func (s *slot) socket() string { return filepath.Join(s.shared(), socketName) }

func (s *slot) instance() vmm.Instance {
	return vmm.Instance{Owner: s.owner, Slot: s.name, Process: s.process, UID: s.uid}
}

// New finds the slots of an earlier daemon and prepares to make new ones: Start makes
// them ahead of time, Claim on demand. Adopt must come before the first Claim of a
// daemon that has owners in its journal. Close ends it. Codes: Invalid,
// FailedPrecondition (the launcher is missing).
func New(ctx context.Context, cfg Config) (*Slots, error) {
	cfg.UIDBase, cfg.UIDCount = orDefault(cfg.UIDBase, defaultUIDBase), orDefault(cfg.UIDCount, defaultUIDCount)
	if err := cfg.check(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Join(cfg.RunDir, "slots"), 0o700); err != nil {
		return nil, fmt.Errorf("create slot directory: %w", err)
	}
	jail, err := newJail(cfg)
	if err != nil {
		return nil, err
	}
	s := &Slots{
		cfg:  cfg,
		jail: jail,
		uids: uids{base: cfg.UIDBase, count: cfg.UIDCount, used: make(map[int]bool)},
		// runc create is processor-bound: more at once only delays all.
		making: make(chan struct{}, 2*runtime.GOMAXPROCS(0)),
		wake:   make(chan struct{}, 1),
		stop:   func() {},
		exits:  make(map[string]vmm.Exit),
		owners: make(map[string]*slot),
		claims: make(map[string]chan struct{}),
	}
	for _, e := range cfg.Exits {
		s.exits[e.Owner] = e
	}
	if err := s.recover(ctx); err != nil {
		return nil, err
	}
	return s, nil
}

func orDefault(v, def int) int {
	if v == 0 {
		return def
	}
	return v
}

func (c Config) check() error {
	for field, path := range map[string]string{
		"runDir": c.RunDir, "launcher": c.Launcher, "runcBinary": c.RuncBinary, "runcRoot": c.RuncRoot, "cgroupParent": c.CgroupParent,
	} {
		if !filepath.IsAbs(path) || filepath.Clean(path) == "/" {
			return cube.InvalidField("runc."+field, "%q is not an absolute path", path)
		}
	}
	if c.UIDBase <= 0 || c.UIDCount <= 0 || c.UIDBase+c.UIDCount > 1<<31-1 {
		return cube.InvalidField("runc.uidBase", "%d user IDs from %d are no range", c.UIDCount, c.UIDBase)
	}
	if c.Client == nil || c.Log == nil {
		return cube.InvalidField("runc", "client and log are needed")
	}
	// A VMM's user is no owner and no group of the launcher.
	if info, err := os.Stat(c.Launcher); err != nil || !info.Mode().IsRegular() || info.Mode()&0o001 == 0 {
		e := cube.Errorf(cube.CodeFailedPrecondition, "%s is not a program that every user may execute", c.Launcher)
		return e.WithHint("install vmm-launcher, which is built together with cubelet, with mode 0755")
	}
	return nil
}

// recover reads what the host has: containers, and the records of their owners. A
// container whose task is gone is kept while it has an owner, so that Wait can tell.
func (s *Slots) recover(ctx context.Context) error {
	containers, err := s.cfg.Client.ContainerService().List(ctx, `labels."`+uidLabel+`"`)
	if err != nil {
		return fmt.Errorf("list slots: %w", err)
	}
	for _, c := range containers {
		uid, err := strconv.Atoi(c.Labels[uidLabel])
		if err != nil || c.Labels[parentLabel] != s.cfg.CgroupParent {
			continue // of another node that shares this containerd
		}
		sl := newSlot(s.cfg.RunDir, c.ID, uid)
		s.uids.reserve(uid)
		rec, err := readRecord(sl.dir)
		if err != nil || rec.Owner == "" || s.owners[rec.Owner] != nil {
			s.foreign = append(s.foreign, sl)
			continue
		}
		sl.owner, sl.process = rec.Owner, rec.Process
		s.owners[sl.owner] = sl
	}
	return nil
}

// Adopt is called once at start with the owners that the journal knows. It destroys
// every other slot of an earlier daemon, the waiting ones included, and keeps those.
func (s *Slots) Adopt(ctx context.Context, owners []string) error {
	keep := make(map[string]bool, len(owners))
	for _, o := range owners {
		keep[o] = true
	}
	s.mu.Lock()
	drop := s.foreign
	s.foreign = nil
	for owner, sl := range s.owners {
		if !keep[owner] {
			drop = append(drop, sl)
		}
	}
	s.mu.Unlock()
	err := s.destroyAll(ctx, drop)
	return errors.Join(err, s.removeStrays())
}

func (s *Slots) destroyAll(ctx context.Context, slots []*slot) error {
	var wg sync.WaitGroup
	errs := make([]error, len(slots))
	limit := make(chan struct{}, cap(s.making))
	for i, sl := range slots {
		limit <- struct{}{}
		wg.Go(func() {
			defer func() { <-limit }()
			errs[i] = s.destroy(ctx, sl)
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// removeStrays repairs a daemon's death between making a slot's directory or cgroup and
// its container, or between removing the container and those.
func (s *Slots) removeStrays() error {
	root := filepath.Join(s.cfg.RunDir, "slots")
	entries, err := os.ReadDir(root)
	if err != nil {
		return fmt.Errorf("list slot directories: %w", err)
	}
	s.mu.Lock()
	known := make(map[string]bool)
	for _, sl := range s.owners {
		known[sl.name] = true
	}
	for _, sl := range s.waiting {
		known[sl.name] = true
	}
	busy := s.user > 0 || len(s.making) > 0
	s.mu.Unlock()
	if busy {
		return nil
	}
	errs := []error{removeStrayCgroups(s.cfg.CgroupParent, known)}
	for _, e := range entries {
		if !known[e.Name()] {
			errs = append(errs, os.RemoveAll(filepath.Join(root, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// Waiting returns the number of slots that are ready to be claimed.
func (s *Slots) Waiting() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.waiting)
}

// Close ends the refill and destroys the waiting slots. Claimed ones go on. Call it
// before the client is closed.
func (s *Slots) Close() error {
	s.mu.Lock()
	s.closed = true
	stop, done := s.stop, s.done
	s.mu.Unlock()
	stop()
	if done != nil {
		<-done
	}
	s.mu.Lock()
	drop := s.waiting
	s.waiting = nil
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), undoTimeout)
	defer cancel()
	err := s.destroyAll(ctx, drop)
	return errors.Join(err, removeCgroupParent(s.cfg.CgroupParent))
}
