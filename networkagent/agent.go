// Package networkagent gives every sandbox a network namespace of its own with a tap
// device in it, connected to the host by a pair of links.
//
// Guest address, gateway and both hardware addresses are the same in every namespace,
// so a restored memory image fits into any of them. A namespace is never used twice:
// its connection table, neighbours and rules end with its sandbox.
//
// What every sandbox may do, as a floor that its policy can only narrow: reach whatever
// the host can reach (private ranges included) in IPv4, except the host itself, other
// sandboxes and link-local addresses such as the metadata service. Nobody but the
// daemon opens a connection to a sandbox. There is no IPv6.
//
// The host is changed in few ways, all of them undone by Close when no sandbox is left:
// the nftables table inet cubelet-<node>, a route that reserves the address range, and
// a link for each slot. IPv4 forwarding is switched on and stays on.
package networkagent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	cube "github.com/cubesandbox/cubelet"
)

const (
	// makers bounds how many slots are made at once: the kernel holds one lock for most
	// of it, so more would only wait in more threads.
	makers     = 4
	minBackoff = 100 * time.Millisecond
	maxBackoff = 10 * time.Second
)

// Agent hands out network slots. Its methods may be called from many goroutines, whose
// threads must be in the network namespace that New was called in.
type Agent struct {
	cfg     Config
	log     *slog.Logger
	prefix  netip.Prefix
	shop    workshop
	records records
	making  chan struct{} // holds a token per slot being made
	refill  chan struct{} // one token: the pool is below its target

	mu      sync.Mutex
	closed  bool
	waiting []*slot
	owners  map[string]*claim
	names   map[string]bool // slots that exist in any state; true: made by this Agent
	next    int             // index to try next
	stop    context.CancelFunc
	stopped chan struct{} // closed when the refill ended; nil before Start
}

// New reserves the address range and sets up the host's rules. Slots of an earlier
// daemon stay as they are until Adopt. Codes: Invalid, FailedPrecondition.
func New(cfg Config) (*Agent, error) {
	cfg, err := cfg.complete()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(cfg.records().dir, 0o700); err != nil {
		return nil, fmt.Errorf("make directory of network slots: %w", err)
	}
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, err
	}
	a := &Agent{
		cfg: cfg, log: cfg.Log,
		shop:    workshop{cfg: cfg, home: home},
		records: cfg.records(),
		making:  make(chan struct{}, makers),
		refill:  make(chan struct{}, 1),
		owners:  map[string]*claim{},
		names:   map[string]bool{},
	}
	if err := a.setUp(); err != nil {
		home.Close()
		return nil, err
	}
	return a, nil
}

func (a *Agent) setUp() error {
	var err error
	if a.prefix, err = claimPrefix(a.cfg); err != nil {
		return err
	}
	changed, err := enableForwarding()
	if err != nil {
		return fmt.Errorf("let the host forward packets: %w", err)
	}
	if changed {
		a.log.Info("switched on IPv4 forwarding, it stays on", "sysctl", forwardSysctl)
	}
	if len(a.cfg.Resolvers) == 0 {
		nl, err := newRoutes()
		if err != nil {
			return err
		}
		a.cfg.Resolvers = hostResolvers(nl)
		nl.Close()
	}
	found, err := a.records.list()
	if err != nil {
		return err
	}
	for owner, r := range found {
		a.owners[owner] = settled(r)
		if r.Slot != "" {
			a.names[r.Slot] = false // even if nothing is left of it
		}
	}
	old, err := existing(a.cfg)
	if err != nil {
		return err
	}
	for _, name := range old {
		a.names[name] = false
	}
	// A fresh start far from the last one's addresses: the host may still have
	// connections of a slot that is gone.
	a.next = rand.IntN(slots(a.prefix))
	a.log.Info("network agent ready", "prefix", a.prefix, "owners", len(found), "resolvers", a.cfg.Resolvers)
	return nil
}

// Start keeps Target slots ready until ctx is done or Close is called. Call it once.
func (a *Agent) Start(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	stopped := make(chan struct{})
	a.mu.Lock()
	a.stop, a.stopped = cancel, stopped
	a.mu.Unlock()
	a.wake()
	go func() {
		defer close(stopped)
		a.keepFilled(ctx)
	}()
}

// Close stops the refill and destroys the slots that wait. Claimed slots go on working
// with the host's rules and await the next Agent; without any, the host is left as it
// was. Claims that are under way end first.
func (a *Agent) Close() error {
	a.mu.Lock()
	if a.closed {
		a.mu.Unlock()
		return nil
	}
	a.closed = true
	stop, stopped := a.stop, a.stopped
	pending := slices.Collect(maps.Values(a.owners))
	a.mu.Unlock()
	if stop != nil {
		stop()
		<-stopped
	}
	for _, c := range pending {
		<-c.settled
	}
	a.mu.Lock()
	waiting, left := a.waiting, len(a.owners)
	a.waiting = nil
	a.mu.Unlock()
	var errs []error
	for _, s := range waiting {
		s.tap.Close()
		errs = append(errs, a.destroy(s.name))
	}
	if left == 0 {
		errs = append(errs, releaseHost(a.cfg, a.prefix))
	}
	errs = append(errs, a.shop.home.Close())
	return errors.Join(errs...)
}

// Waiting returns how many slots are ready to be claimed.
func (a *Agent) Waiting() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.waiting)
}

// Nameservers returns the addresses that guests are to ask for names, best first.
func (a *Agent) Nameservers() []string {
	var out []string
	for _, r := range a.cfg.Resolvers {
		out = append(out, r.String())
	}
	return out
}

// Prefix returns the range that the links of this node have their addresses from.
func (a *Agent) Prefix() netip.Prefix { return a.prefix }

func (a *Agent) wake() {
	select {
	case a.refill <- struct{}{}:
	default:
	}
}

// keepFilled makes one slot at a time, so that claims which find none are not held up
// by more than one.
func (a *Agent) keepFilled(ctx context.Context) {
	backoff := minBackoff
	for {
		for a.Waiting() < a.cfg.Target && ctx.Err() == nil {
			if err := a.addWaiting(ctx); err != nil && ctx.Err() == nil {
				a.log.Warn("cannot prepare a network slot", "error", err, "retry", backoff)
				pause(ctx, backoff)
				backoff = min(2*backoff, maxBackoff)
				continue
			}
			backoff = minBackoff
		}
		select {
		case <-a.refill:
		case <-ctx.Done():
			return
		}
	}
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

func (a *Agent) addWaiting(ctx context.Context) error {
	s, err := a.makeSlot(ctx)
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.waiting = append(a.waiting, s)
	return nil
}

// makeSlot makes a slot under a name that is free. Codes: ResourceExhausted when the
// prefix has no address left, those of ctx.
func (a *Agent) makeSlot(ctx context.Context) (*slot, error) {
	select {
	case a.making <- struct{}{}:
		defer func() { <-a.making }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	index, err := a.takeIndex()
	if err != nil {
		return nil, err
	}
	name := a.cfg.slotName(index)
	s, err := a.shop.make(a.prefix, index)
	if err == nil {
		return s, nil
	}
	if _, gone := os.Lstat(a.cfg.slotPath(name)); gone != nil {
		a.forget(name)
	} else {
		a.mu.Lock()
		a.names[name] = false // left for Adopt
		a.mu.Unlock()
	}
	return nil, err
}

// takeIndex goes round the prefix, so that an address rests as long as it can before
// the next sandbox has it.
func (a *Agent) takeIndex() (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := slots(a.prefix)
	for range n {
		index := a.next
		a.next = (a.next + 1) % n
		name := a.cfg.slotName(index)
		if _, taken := a.names[name]; !taken {
			a.names[name] = true
			return index, nil
		}
	}
	return 0, cube.Errorf(cube.CodeResourceExhausted, "all %d address pairs of %s are in use", n, a.prefix)
}

func (a *Agent) forget(name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.names, name)
}

func (a *Agent) destroy(name string) error {
	if err := a.shop.destroy(name); err != nil {
		return err
	}
	a.forget(name)
	return nil
}

// existing returns the names of all slots of the node of which anything is there: a
// link, or a pinned or formerly pinned namespace.
func existing(cfg Config) ([]string, error) {
	nl, err := newRoutes()
	if err != nil {
		return nil, err
	}
	defer nl.Close()
	links, err := linkNames(nl)
	if err != nil {
		return nil, err
	}
	found := slices.Collect(maps.Values(links))
	entries, err := os.ReadDir(cfg.RunDir)
	if err != nil {
		return nil, fmt.Errorf("list network slots: %w", err)
	}
	for _, e := range entries {
		found = append(found, e.Name())
	}
	found = slices.DeleteFunc(found, func(s string) bool { return !strings.HasPrefix(s, cfg.linkPrefix()) })
	slices.Sort(found)
	return slices.Compact(found), nil
}
