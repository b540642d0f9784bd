package networkagent

import (
	"context"
	"os"
	"strings"
	"testing"

	"github.com/google/nftables"

	cube "github.com/cubesandbox/cubelet"
)

func TestForeignFirewallIsAnObstacle(t *testing.T) {
	newWorld(t)
	a := start(t, testConfig(t, "t"))
	before, err := Obstacles()
	must(t, err)
	conn, err := nftables.New()
	must(t, err)
	drop := nftables.ChainPolicyDrop
	table := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "filter"})
	conn.AddChain(&nftables.Chain{
		Table: table, Name: "FORWARD", Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward,
		Priority: nftables.ChainPriorityFilter, Policy: &drop,
	})
	must(t, conn.Flush())
	found, err := Obstacles()
	must(t, err)
	conn.DelTable(table)
	must(t, conn.Flush())
	if len(found) != len(before)+1 || !strings.Contains(found[0], "chain FORWARD of nftables table filter") {
		t.Errorf("found %q, before %q", found, before)
	}
	if wrong := a.Check(context.Background(), nil); len(wrong) > 0 {
		t.Errorf("check: %q", wrong)
	}
}

func TestCheckSeesWhatWasChangedOnTheHost(t *testing.T) {
	newWorld(t)
	a := start(t, testConfig(t, "t"))
	for what, change := range map[string]struct {
		do   func() error
		want string
	}{
		"table removed": {func() error { return removeTable(a.cfg.tableName()) }, "is missing"},
		"rule removed":  {func() error { return dropRule(a.cfg.tableName(), "forward") }, "chain forward of nftables table inet cubelet-t was changed"},
		"route removed": {func() error {
			nl, err := newRoutes()
			if err != nil {
				return err
			}
			defer nl.Close()
			return nl.RouteDel(reservation(a.prefix))
		}, "the route that reserves"},
		"forwarding off": {func() error { return os.WriteFile(forwardSysctl, []byte("0"), 0) }, "is not 1"},
	} {
		t.Run(what, func(t *testing.T) {
			must(t, change.do())
			found := a.Check(context.Background(), nil)
			if len(found) != 1 || !strings.Contains(found[0], change.want) {
				t.Errorf("check: %q, want %q", found, change.want)
			}
			must(t, a.Adopt(context.Background(), nil))
			if found := a.Check(context.Background(), nil); len(found) > 0 {
				t.Errorf("not repaired: %q", found)
			}
		})
	}
}

func dropRule(table, chain string) error {
	conn, err := nftables.New()
	if err != nil {
		return err
	}
	t := &nftables.Table{Family: nftables.TableFamilyINet, Name: table}
	rules, err := conn.GetRules(t, &nftables.Chain{Table: t, Name: chain})
	if err != nil {
		return err
	}
	if err := conn.DelRule(rules[0]); err != nil {
		return err
	}
	return conn.Flush()
}

func TestReleaseWaitsForAClaimUnderWay(t *testing.T) {
	newWorld(t)
	a := start(t, testConfig(t, "t"))
	for range makers {
		a.making <- struct{}{}
	}
	claimed := make(chan error, 1)
	go func() {
		tap, err := a.Claim(context.Background(), "one", cube.NetworkSpec{})
		if err == nil {
			err = tap.Close()
		}
		claimed <- err
	}()
	for owners := []string(nil); len(owners) == 0; {
		owners, _ = a.List(context.Background())
	}
	if _, err := a.Dial(context.Background(), "one", 80); !cube.IsNotFound(err) {
		t.Errorf("dial before the slot is handed out: %v", err)
	}
	short, cancel := context.WithCancel(context.Background())
	cancel()
	if err := a.Release(short, "one"); cube.CodeOf(err) != cube.CodeCanceled {
		t.Errorf("release by a caller who is gone: %v", err)
	}
	released := make(chan error, 1)
	go func() { released <- a.Release(context.Background(), "one") }()
	for range makers {
		<-a.making
	}
	must(t, <-claimed)
	must(t, <-released)
	if owners, _ := a.List(context.Background()); len(owners) > 0 {
		t.Errorf("owners after Release: %v", owners)
	}
}
