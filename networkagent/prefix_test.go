package networkagent

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	cube "github.com/cubesandbox/cubelet"
)

func mustPrefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }

func TestChoicesAvoidWhatIsUsed(t *testing.T) {
	lan := use{mustPrefix("10.0.0.0/8"), "route 10.0.0.0/8 dev tun0"}
	docker := use{mustPrefix("172.16.0.0/12"), "route 172.16.0.0/12"}
	bench := use{mustPrefix("198.18.0.0/15"), "route 198.18.0.0/15"}
	for _, tc := range []struct {
		name               string
		configured, former string
		used               []use
		first              string
		code               cube.Code
		text               string
	}{
		{name: "nothing used", first: "10.201.0.0/16"},
		{name: "the former one again", former: "172.29.0.0/16", first: "172.29.0.0/16"},
		{name: "the former one is taken", former: "10.202.0.0/16", used: []use{lan}, first: "172.29.0.0/16"},
		{name: "two ranges used", used: []use{lan, docker}, first: "198.18.0.0/16"},
		{name: "all used", used: []use{lan, docker, bench}, code: cube.CodeFailedPrecondition, text: "10.201.0.0/16 overlaps route 10.0.0.0/8 dev tun0"},
		{name: "configured", configured: "100.64.0.0/16", former: "10.201.0.0/16", first: "100.64.0.0/16"},
		{name: "configured is used", configured: "10.9.0.0/16", used: []use{lan}, code: cube.CodeInvalid, text: "10.9.0.0/16 overlaps route 10.0.0.0/8 dev tun0"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := choices(optional(tc.configured), optional(tc.former), tc.used)
			if tc.text != "" {
				if err == nil || cube.CodeOf(err) != tc.code || !strings.Contains(err.Error(), tc.text) {
					t.Errorf("%v, want code %v and %q", err, tc.code, tc.text)
				}
				return
			}
			must(t, err)
			if got[0] != mustPrefix(tc.first) {
				t.Errorf("first choice %s, want %s", got[0], tc.first)
			}
		})
	}
}

func optional(s string) netip.Prefix {
	if s == "" {
		return netip.Prefix{}
	}
	return mustPrefix(s)
}

func TestRangeThatTheHostUsesIsRefused(t *testing.T) {
	newWorld(t)
	routes, err := newRoutes()
	must(t, err)
	defer routes.Close()
	must(t, routes.RouteAdd(&netlink.Route{Dst: ipNet(mustPrefix("10.0.0.0/8")), Gw: net.ParseIP(routerAddr)}))
	for prefix, text := range map[string]string{
		"10.55.0.0/16":    "overlaps route 10.0.0.0/8 dev eth0",
		"192.168.64.0/18": "overlaps address 192.168.77.1/24 of eth0",
	} {
		cfg := testConfig(t, "t")
		cfg.HostPrefix = mustPrefix(prefix)
		_, err := New(cfg)
		if err == nil || cube.CodeOf(err) != cube.CodeInvalid || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v, want %q", prefix, err, text)
		}
	}
	if nodes, err := nodePrefixes(); err != nil || len(nodes) > 0 {
		t.Errorf("refused agents left tables: %v, %v", nodes, err)
	}
	a := start(t, testConfig(t, "t"))
	if a.Prefix() != mustPrefix("172.29.0.0/16") {
		t.Errorf("chose %s", a.Prefix())
	}
	cfg := testConfig(t, "u")
	cfg.HostPrefix = mustPrefix("172.29.4.0/24")
	_, err = New(cfg)
	if err == nil || !strings.Contains(err.Error(), "of another node (nftables table cubelet-t)") {
		t.Errorf("the other node's range: %v", err)
	}
}

func TestARangeCanChangeWhileSandboxesRun(t *testing.T) {
	newWorld(t)
	cfg := testConfig(t, "t")
	first, err := New(cfg)
	must(t, err)
	g := newGuest(t, claimFor(t, first, "one", cube.NetworkSpec{}))
	must(t, first.Close())
	cfg.HostPrefix = mustPrefix("10.99.0.0/24")
	second := start2(t, cfg, "one")
	_, err = g.get(siteAddr)
	must(t, err)
	if left, err := isReserved(first.Prefix()); err != nil || left {
		t.Errorf("the former range is still reserved: %v, %v", left, err)
	}
	h := newGuest(t, claimFor(t, second, "two", cube.NetworkSpec{}))
	_, err = h.get(siteAddr)
	must(t, err)
}

func TestPairsFillThePrefix(t *testing.T) {
	p := mustPrefix("10.201.0.0/16")
	host, inside := pair(p, 0)
	if host != mustPrefix("10.201.0.0/31") || inside != mustPrefix("10.201.0.1/31") {
		t.Errorf("first pair %s %s", host, inside)
	}
	host, inside = pair(p, slots(p)-1)
	if host != mustPrefix("10.201.255.254/31") || inside != mustPrefix("10.201.255.255/31") {
		t.Errorf("last pair %s %s", host, inside)
	}
}

func TestElementsDescribeAPrefix(t *testing.T) {
	for _, s := range []string{"10.201.0.0/16", "10.16.0.0/12", "192.168.7.0/24", "1.2.3.4/32"} {
		got, ok := prefixOf(elements([]netip.Prefix{mustPrefix(s)}))
		if !ok || got != mustPrefix(s) {
			t.Errorf("%s became %s, %v", s, got, ok)
		}
	}
	if p, ok := prefixOf(nil); ok {
		t.Errorf("an empty set is %s", p)
	}
}

func TestConfigIsValidated(t *testing.T) {
	good := Config{RunDir: "/run/x", Node: "n1"}
	_, err := good.complete()
	must(t, err)
	x, err := Config{RunDir: "/run/x"}.complete()
	must(t, err)
	y, err := Config{RunDir: "/run/y/"}.complete()
	must(t, err)
	if len(x.Node) != tagLength || x.Node == y.Node {
		t.Errorf("derived node tags %q and %q", x.Node, y.Node)
	}
	for what, spoil := range map[string]func(*Config){
		"relative directory": func(c *Config) { c.RunDir = "x" },
		"long node":          func(c *Config) { c.Node = "abcdefg" },
		"node with a dash":   func(c *Config) { c.Node = "a-b" },
		"negative target":    func(c *Config) { c.Target = -1 },
		"host bits":          func(c *Config) { c.HostPrefix = mustPrefix("10.1.2.3/16") },
		"range too small":    func(c *Config) { c.HostPrefix = mustPrefix("10.1.2.0/25") },
		"range too large":    func(c *Config) { c.HostPrefix = mustPrefix("10.0.0.0/8") },
		"IPv6":               func(c *Config) { c.HostPrefix = mustPrefix("fd00::/16") },
	} {
		c := good
		spoil(&c)
		if _, err := c.complete(); cube.CodeOf(err) != cube.CodeInvalid || err == nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestLinkNamesFitTheKernel(t *testing.T) {
	cfg := Config{Node: "abcdef", HostPrefix: mustPrefix("10.16.0.0/12")}
	if name := cfg.slotName(slots(cfg.HostPrefix) - 1); len(name) > 15 {
		t.Errorf("%s has %d bytes", name, len(name))
	}
}

func TestResolvConfIsParsed(t *testing.T) {
	got := parseResolvConf([]byte("# x\nsearch lan\nnameserver 10.0.0.1\nnameserver  fe80::1%eth0\nnameserver\nnameserver x\noptions ndots:1\nnameserver\t9.9.9.9\n"))
	want := []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fe80::1%eth0"), netip.MustParseAddr("9.9.9.9")}
	if !slices.Equal(got, want) {
		t.Errorf("got %v", got)
	}
}

func FuzzResolvConf(f *testing.F) {
	f.Add([]byte("nameserver 10.0.0.1\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, a := range parseResolvConf(b) {
			if !a.IsValid() {
				t.Errorf("%q has an invalid name server", b)
			}
		}
	})
}

func FuzzRecord(f *testing.F) {
	d := records{dir: "/run/x/owners", links: "clt-"}
	f.Add([]byte(`{"slot":"clt-1","guests":["169.254.0.22"]}`))
	f.Add([]byte(`{"slot":"clt-../eth0"}`))
	f.Add([]byte(`{"slot":"clt-1","guests":["fe80::1",""]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := d.parse(b)
		if r.Slot != "" && (!strings.HasPrefix(r.Slot, d.links) || strings.ContainsAny(r.Slot, "/.")) {
			t.Errorf("%q names the slot %q", b, r.Slot)
		}
		for _, a := range r.Guests {
			if !a.Is4() {
				t.Errorf("%q has the guest address %q", b, a)
			}
		}
	})
}
