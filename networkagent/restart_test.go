package networkagent

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

// abandon ends an agent as kill -9 would: nothing is cleaned up, and its taps close.
func abandon(a *Agent) {
	a.mu.Lock()
	stop, stopped, waiting := a.stop, a.stopped, a.waiting
	a.closed, a.waiting = true, nil
	a.mu.Unlock()
	if stop != nil {
		stop()
		<-stopped
	}
	for _, s := range waiting {
		s.tap.Close()
	}
}

func TestSandboxesOutliveTheDaemon(t *testing.T) {
	newWorld(t)
	cfg := testConfig(t, "t")
	cfg.Target = 2
	first, err := New(cfg)
	must(t, err)
	must(t, first.Adopt(context.Background(), nil))
	first.Start(context.Background())
	g := newGuest(t, claimFor(t, first, "kept", cube.NetworkSpec{CIDR: "192.168.10.0/24"}))
	g.listen(t, ":80", echo)
	claimFor(t, first, "unknown", cube.NetworkSpec{}).Close()
	old, err := g.dial(siteAddr + ":80")
	must(t, err)
	defer old.Close()
	testenv.Eventually(t, patience, func() error {
		if n := first.Waiting(); n != 2 {
			return fmt.Errorf("%d slots wait", n)
		}
		return nil
	})
	abandon(first)

	// What an administrator's `nft flush ruleset` does meanwhile is put right.
	must(t, removeTable(cfg.tableName()))
	second, err := New(cfg)
	must(t, err)
	t.Cleanup(func() { closeAgent(t, second) })
	owners, err := second.List(context.Background())
	must(t, err)
	if !slices.Equal(owners, []string{"kept", "unknown"}) {
		t.Errorf("the new daemon knows %v", owners)
	}
	must(t, second.Adopt(context.Background(), []string{"kept"}))
	if found := second.Check(context.Background(), []string{"kept"}); len(found) > 0 {
		t.Errorf("check: %v", found)
	}
	_, err = fmt.Fprint(old, "GET / HTTP/1.0\r\n\r\n")
	must(t, err)
	must(t, old.SetReadDeadline(time.Now().Add(patience)))
	_, err = old.Read(make([]byte, 1))
	must(t, err)
	_, err = g.get(siteAddr)
	must(t, err)
	c, err := second.Dial(context.Background(), "kept", 80)
	must(t, err)
	must(t, echoes(c))
	must(t, c.Close())
	must(t, second.Release(context.Background(), "kept"))
	g.cannotReach(t, siteAddr+":80")
}

func TestClosedAgentLeavesClaimedSlotsWorking(t *testing.T) {
	newWorld(t)
	cfg := testConfig(t, "t")
	cfg.Target = 1
	first, err := New(cfg)
	must(t, err)
	first.Start(context.Background())
	g := newGuest(t, claimFor(t, first, "one", cube.NetworkSpec{}))
	must(t, first.Close())
	must(t, first.Close())
	_, err = g.get(siteAddr)
	must(t, err)
	if _, err := first.Claim(context.Background(), "two", cube.NetworkSpec{}); cube.CodeOf(err) != cube.CodeUnavailable {
		t.Errorf("claim after Close: %v", err)
	}
	found, err := Inspect(cfg, []string{"one"})
	must(t, err)
	if len(found) > 0 {
		t.Errorf("after Close: %v", found)
	}
	second := start2(t, cfg, "one")
	if second.Prefix() != first.Prefix() {
		t.Errorf("the range moved from %s to %s", first.Prefix(), second.Prefix())
	}
}

// start2 makes an agent that takes over from an earlier one.
func start2(t testing.TB, cfg Config, owners ...string) *Agent {
	t.Helper()
	a, err := New(cfg)
	must(t, err)
	t.Cleanup(func() { closeAgent(t, a) })
	must(t, a.Adopt(context.Background(), owners))
	return a
}

// Each state is one that kill -9 can leave in the middle of making a slot, claiming it
// or releasing it.
func TestAdoptClearsWhatAKilledDaemonLeft(t *testing.T) {
	newWorld(t)
	for what, leave := range map[string]func(a *Agent) error{
		"only the file": func(a *Agent) error {
			return os.WriteFile(a.cfg.slotPath(a.cfg.slotName(7)), nil, 0o600)
		},
		"namespace without links": func(a *Agent) error {
			path := a.cfg.slotPath(a.cfg.slotName(7))
			if err := os.WriteFile(path, nil, 0o600); err != nil {
				return err
			}
			return onThread(a.shop.home, func() error {
				tap, err := newNamespace(path)
				if err != nil {
					return err
				}
				return tap.Close()
			})
		},
		"link without address": func(a *Agent) error {
			return addVeth(a.cfg.slotName(7))
		},
		"waiting slot": func(a *Agent) error {
			s, err := a.shop.make(a.prefix, 7)
			if err != nil {
				return err
			}
			return s.tap.Close()
		},
		"unfinished record": func(a *Agent) error {
			return os.WriteFile(filepath.Join(a.records.dir, ".one"), []byte("{"), 0o600)
		},
		"record without slot": func(a *Agent) error {
			return a.records.put("one", record{Slot: a.cfg.slotName(7)})
		},
		"record that names the host's own link": func(a *Agent) error {
			return a.records.put("one", record{Slot: "eth0"})
		},
		"empty record": func(a *Agent) error {
			return os.WriteFile(filepath.Join(a.records.dir, "one"), nil, 0o600)
		},
	} {
		t.Run(what, func(t *testing.T) {
			cfg := testConfig(t, "t")
			first, err := New(cfg)
			must(t, err)
			must(t, leave(first))
			abandon(first)
			if what != "unfinished record" {
				found, err := Inspect(cfg, nil)
				must(t, err)
				if len(found) == 0 {
					t.Error("inspect sees nothing")
				}
			}
			second := start2(t, cfg)
			if links, err := hostLinks(); err != nil || !links["eth0"] {
				t.Errorf("the host's own link is gone: %v", err)
			}
			if found := second.Check(context.Background(), nil); len(found) > 0 {
				t.Errorf("check: %v", found)
			}
			entries, err := os.ReadDir(cfg.records().dir)
			must(t, err)
			if len(entries) > 0 {
				t.Errorf("records left: %v", entries)
			}
		})
	}
}

func addVeth(name string) error {
	routes, err := newRoutes()
	if err != nil {
		return err
	}
	defer routes.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	link := netlink.NewVeth(attrs)
	link.PeerName = "peer0"
	return routes.LinkAdd(link)
}

// A lost mount namespace takes the pins of running sandboxes with it. Their links must
// not be taken for somebody's leftovers before the sandboxes are released.
func TestNewSlotsAvoidNamesOfLostOnes(t *testing.T) {
	newWorld(t)
	cfg := testConfig(t, "t")
	cfg.HostPrefix = mustPrefix("10.99.0.0/24")
	a := start(t, cfg)
	a.next = 5
	tap := claimFor(t, a, "one", cube.NetworkSpec{}) // held by the VMM
	defer tap.Close()
	name := slotOf(t, a, "one")
	must(t, unix.Unmount(cfg.slotPath(name), 0))
	must(t, os.Remove(cfg.slotPath(name)))
	abandon(a)
	b := start2(t, cfg, "one")
	b.next = 5
	claimFor(t, b, "two", cube.NetworkSpec{}).Close()
	if got := slotOf(t, b, "two"); got == name {
		t.Errorf("%s is used twice", got)
	}
	if _, err := b.Dial(context.Background(), "one", 80); !cube.IsNotFound(err) {
		t.Errorf("dial to a lost namespace: %v", err)
	}
	found := b.Check(context.Background(), []string{"one", "two"})
	if len(found) != 1 || !strings.Contains(found[0], "is missing") {
		t.Errorf("check: %v", found)
	}
	a.owners = map[string]*claim{}
}
