package networkagent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/hosttest"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

func TestAgentKeepsToTheContract(t *testing.T) {
	newWorld(t)
	hosttest.RunNetwork(t, start(t, testConfig(t, "t")))
}

func TestFiftyClaimsAtOnceFromNothing(t *testing.T) {
	newWorld(t)
	a := start(t, testConfig(t, "t"))
	var wg sync.WaitGroup
	errs := make([]error, 50)
	for i := range errs {
		wg.Go(func() {
			tap, err := a.Claim(context.Background(), fmt.Sprintf("sbx-%d", i), cube.NetworkSpec{})
			if err == nil {
				err = tap.Close()
			}
			errs[i] = err
		})
	}
	wg.Wait()
	must(t, errors.Join(errs...))
	owners, err := a.List(context.Background())
	must(t, err)
	if len(owners) != len(errs) {
		t.Errorf("%d owners, want %d", len(owners), len(errs))
	}
	if found := a.Check(context.Background(), owners); len(found) > 0 {
		t.Errorf("check: %v", found)
	}
	for _, o := range owners {
		wg.Go(func() {
			if err := a.Release(context.Background(), o); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

func TestTwoHundredSandboxesLeaveNothing(t *testing.T) {
	newWorld(t)
	cfg := testConfig(t, "t")
	cfg.Target = 3
	a := start(t, cfg)
	full := func() error {
		if n := a.Waiting(); n != cfg.Target {
			return fmt.Errorf("%d slots wait", n)
		}
		return nil
	}
	testenv.Eventually(t, patience, full)
	before := tally(t, a)
	for i := range 200 {
		spec := cube.NetworkSpec{}
		if i%10 == 0 {
			spec.CIDR = "192.168.10.0/24"
		}
		owner := fmt.Sprintf("sbx-%d", i)
		tap := claimFor(t, a, owner, spec)
		must(t, tap.Close())
		must(t, a.Release(context.Background(), owner))
	}
	testenv.Eventually(t, 20*time.Second, func() error {
		if err := full(); err != nil {
			return err
		}
		after := tally(t, a)
		after.namespaces = max(after.namespaces, before.namespaces) // one of an earlier test may have ended
		if after != before {
			return fmt.Errorf("%+v, before it was %+v", after, before)
		}
		return nil
	})
	if found := a.Check(context.Background(), nil); len(found) > 0 {
		t.Errorf("check: %v", found)
	}
}

// counts is everything that could leak.
type counts struct {
	files, goroutines, links, pins, namespaces, routes int
}

func tally(t testing.TB, a *Agent) counts {
	t.Helper()
	var c counts
	fds, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	c.files = len(fds)
	c.goroutines = runtime.NumGoroutine()
	links, err := hostLinks()
	must(t, err)
	c.links = len(links)
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	c.pins = strings.Count(string(mounts), a.cfg.RunDir)
	// The host's namespace numbers every namespace that it shares a link with.
	c.namespaces = len(dump(t, unix.RTM_GETNSID, unix.AF_UNSPEC))
	c.routes = len(dump(t, unix.RTM_GETROUTE, unix.AF_INET))
	return c
}

func dump(t testing.TB, kind int, family uint8) [][]byte {
	t.Helper()
	req := nl.NewNetlinkRequest(kind, unix.NLM_F_DUMP)
	req.AddData(&nl.RtGenMsg{RtGenmsg: unix.RtGenmsg{Family: family}})
	msgs, err := req.Execute(unix.NETLINK_ROUTE, 0)
	must(t, err)
	return msgs
}

func TestClaimTakesAPreparedSlotFirst(t *testing.T) {
	newWorld(t)
	cfg := testConfig(t, "t")
	cfg.Target = 2
	a := start(t, cfg)
	testenv.Eventually(t, patience, func() error {
		if n := a.Waiting(); n != 2 {
			return fmt.Errorf("%d slots wait", n)
		}
		return nil
	})
	a.mu.Lock()
	want := a.waiting[0].name
	a.mu.Unlock()
	claimFor(t, a, "one", cube.NetworkSpec{}).Close()
	if got := slotOf(t, a, "one"); got != want {
		t.Errorf("claimed %s, the oldest waiting is %s", got, want)
	}
	must(t, a.Release(context.Background(), "one"))
	testenv.Eventually(t, patience, func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		if len(a.waiting) != 2 {
			return fmt.Errorf("%d slots wait", len(a.waiting))
		}
		if slices.ContainsFunc(a.waiting, func(s *slot) bool { return s.name == want }) {
			t.Fatalf("%s is used again", want)
		}
		return nil
	})
}

func TestClaimRefusesWhatCannotBe(t *testing.T) {
	newWorld(t)
	a := start(t, testConfig(t, "t"))
	claimFor(t, a, "one", cube.NetworkSpec{}).Close()
	canceled, cancel := context.WithCancel(context.Background())
	cancel()
	for range makers {
		a.making <- struct{}{} // all makers are busy, so only ctx decides
	}
	for _, tc := range []struct {
		name, owner, cidr string
		want              cube.Code
	}{
		{"second claim", "one", "", cube.CodeAlreadyExists},
		{"no owner", "", "", cube.CodeInvalid},
		{"owner is a path", "../x", "", cube.CodeInvalid},
		{"hidden owner", ".x", "", cube.CodeInvalid},
		{"bad subnet", "two", "192.168.10.1/24", cube.CodeInvalid},
		{"the node's own range", "two", a.Prefix().String(), cube.CodeInvalid},
		{"caller gone", "two", "", cube.CodeCanceled},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := a.Claim(canceled, tc.owner, cube.NetworkSpec{CIDR: tc.cidr})
			if got := cube.CodeOf(err); err == nil || got != tc.want {
				t.Errorf("%v (%v), want code %v", err, got, tc.want)
			}
		})
	}
	for range makers {
		<-a.making
	}
	if found := a.Check(context.Background(), []string{"one"}); len(found) > 0 {
		t.Errorf("check: %v", found)
	}
}

func TestReleaseIsSafeToRepeat(t *testing.T) {
	newWorld(t)
	a := start(t, testConfig(t, "t"))
	must(t, a.Release(context.Background(), "nobody"))
	claimFor(t, a, "one", cube.NetworkSpec{}).Close()
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() {
			if err := a.Release(context.Background(), "one"); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	claimFor(t, a, "one", cube.NetworkSpec{}).Close()
	must(t, a.Release(context.Background(), "one"))
}

// The half states are those that a crash or an administrator can leave.
func TestReleaseWorksOnWhatIsLeftOfASlot(t *testing.T) {
	newWorld(t)
	a := start(t, testConfig(t, "t"))
	for what, spoil := range map[string]func(name string) error{
		"link gone":   removeLink,
		"not pinned":  func(name string) error { return unix.Unmount(a.cfg.slotPath(name), 0) },
		"record gone": func(string) error { return a.records.remove("one") },
		"nothing left": func(name string) error {
			return errors.Join(a.shop.destroy(name), a.records.remove("one"))
		},
	} {
		t.Run(what, func(t *testing.T) {
			claimFor(t, a, "one", cube.NetworkSpec{}).Close()
			must(t, spoil(slotOf(t, a, "one")))
			if found := a.Check(context.Background(), []string{"one"}); len(found) == 0 {
				t.Error("check sees nothing")
			}
			must(t, a.Release(context.Background(), "one"))
			if found := a.Check(context.Background(), nil); len(found) > 0 {
				t.Errorf("check: %v", found)
			}
		})
	}
}

func TestReleaseIsolatesAVMMThatHoldsItsTap(t *testing.T) {
	newWorld(t)
	a := start(t, testConfig(t, "t"))
	g := newGuest(t, claimFor(t, a, "one", cube.NetworkSpec{}))
	_, err := g.get(siteAddr)
	must(t, err)
	must(t, a.Release(context.Background(), "one"))
	g.cannotReach(t, siteAddr+":80")
}

func TestFullRangeIsAClearError(t *testing.T) {
	newWorld(t)
	cfg := testConfig(t, "t")
	cfg.HostPrefix = mustPrefix("10.99.0.0/24")
	a := start(t, cfg)
	a.mu.Lock()
	for i := range slots(a.prefix) {
		a.names[cfg.slotName(i)] = true
	}
	a.mu.Unlock()
	if _, err := a.Claim(context.Background(), "one", cube.NetworkSpec{}); cube.CodeOf(err) != cube.CodeResourceExhausted {
		t.Errorf("claim in a full range: %v", err)
	}
	if owners, _ := a.List(context.Background()); len(owners) > 0 {
		t.Errorf("owners %v after a failed claim", owners)
	}
}

// The pool must recover by itself from a kernel that refuses for a while.
func TestRefillGoesOnAfterAFailure(t *testing.T) {
	newWorld(t)
	cfg := testConfig(t, "t")
	cfg.Target = 1
	a, err := New(cfg)
	must(t, err)
	t.Cleanup(func() { closeAgent(t, a) })
	// Its name exists, unknown to the agent.
	must(t, os.WriteFile(cfg.slotPath(cfg.slotName(a.next)), nil, 0o600))
	blocker := cfg.slotPath(cfg.slotName(a.next))
	a.Start(context.Background())
	testenv.Eventually(t, patience, func() error {
		if n := a.Waiting(); n != 1 {
			return fmt.Errorf("%d slots wait", n)
		}
		return nil
	})
	must(t, os.Remove(blocker))
}

func TestMainThreadNeverLeavesTheHost(t *testing.T) {
	home, err := os.Open("/proc/self/ns/net")
	must(t, err)
	defer home.Close()
	want, err := os.Readlink("/proc/self/ns/net")
	must(t, err)
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			err := onThread(home, func() error {
				if unix.Gettid() == unix.Getpid() {
					t.Error("the main thread was used")
				}
				return unix.Unshare(unix.CLONE_NEWNET)
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	got, err := os.Readlink("/proc/self/ns/net")
	must(t, err)
	if got != want {
		t.Errorf("the process is in %s, was in %s", got, want)
	}
	threads, err := filepath.Glob("/proc/self/task/*/ns/net")
	must(t, err)
	for _, path := range threads {
		if ns, err := os.Readlink(path); err == nil && ns != want {
			t.Errorf("thread %s stays in %s", path, ns)
		}
	}
}
