package networkagent

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
)

// routeProtocol marks the routes that reserve a node's prefix on its host.
const routeProtocol = 203

// use is an address range that something on the host already has.
type use struct {
	prefix netip.Prefix
	what   string // for people, for example "route 10.0.0.0/8 dev tun0"
}

// candidates are the ranges to choose from when none is configured: corners of the
// private ranges that few use, then the range for benchmarks.
func candidates() []netip.Prefix {
	return []netip.Prefix{
		netip.MustParsePrefix("10.201.0.0/16"),
		netip.MustParsePrefix("10.202.0.0/16"),
		netip.MustParsePrefix("10.203.0.0/16"),
		netip.MustParsePrefix("10.204.0.0/16"),
		netip.MustParsePrefix("172.29.0.0/16"),
		netip.MustParsePrefix("172.30.0.0/16"),
		netip.MustParsePrefix("198.18.0.0/16"),
		netip.MustParsePrefix("198.19.0.0/16"),
	}
}

// choices returns the prefixes to try, best first: the configured one alone, else the
// former one, else candidates, each only if nothing uses it.
func choices(configured, former netip.Prefix, used []use) ([]netip.Prefix, error) {
	if configured.IsValid() {
		if u, taken := overlap(configured, used); taken {
			return nil, cube.InvalidField("hostPrefix", "%s overlaps %s", configured, u.what).
				WithHint("Choose a range that no route of this host covers, or leave it unset.")
		}
		return []netip.Prefix{configured}, nil
	}
	all := candidates()
	if former.IsValid() {
		all = append([]netip.Prefix{former}, all...)
	}
	var free []netip.Prefix
	var why []string
	for _, p := range all {
		if u, taken := overlap(p, used); taken {
			why = append(why, fmt.Sprintf("%s overlaps %s", p, u.what))
			continue
		}
		free = append(free, p)
	}
	if len(free) == 0 {
		return nil, cube.Errorf(cube.CodeFailedPrecondition, "no free address range for sandboxes: %s", strings.Join(why, ", ")).
			WithHint("Configure a host prefix that no route of this host covers.")
	}
	return free, nil
}

func overlap(p netip.Prefix, used []use) (use, bool) {
	for _, u := range used {
		if u.prefix.Overlaps(p) {
			return u, true
		}
	}
	return use{}, false
}

// usedRanges lists the addresses and routes of the host and the ranges of other nodes,
// but nothing of this node. Routes shorter than /8 are default routes in disguise and
// stand for no network of their own.
func usedRanges(nl *netlink.Handle, cfg Config, nodes map[string]netip.Prefix) ([]use, error) {
	names, err := linkNames(nl)
	if err != nil {
		return nil, err
	}
	addrs, err := nl.AddrList(nil, netlink.FAMILY_V4)
	if err != nil {
		return nil, fmt.Errorf("list host addresses: %w", err)
	}
	var used []use
	for _, a := range addrs {
		p, err := netip.ParsePrefix(a.IPNet.String())
		link := names[a.LinkIndex]
		if err != nil || strings.HasPrefix(link, cfg.linkPrefix()) {
			continue
		}
		used = append(used, use{p.Masked(), fmt.Sprintf("address %s of %s", p, link)})
	}
	every := netlink.Route{Table: unix.RT_TABLE_UNSPEC}
	routes, err := nl.RouteListFiltered(netlink.FAMILY_V4, &every, netlink.RT_FILTER_TABLE)
	if err != nil {
		return nil, fmt.Errorf("list host routes: %w", err)
	}
	for _, r := range routes {
		if u, ok := routeUse(r, names, cfg); ok {
			used = append(used, u)
		}
	}
	for table, p := range nodes {
		if table != cfg.tableName() {
			used = append(used, use{p, fmt.Sprintf("%s of another node (nftables table %s)", p, table)})
		}
	}
	return used, nil
}

func routeUse(r netlink.Route, names map[int]string, cfg Config) (use, bool) {
	if r.Dst == nil || r.Table == unix.RT_TABLE_LOCAL || r.Protocol == routeProtocol {
		return use{}, false // reservations are known from the nodes' tables
	}
	p, err := netip.ParsePrefix(r.Dst.String())
	link := names[r.LinkIndex]
	if err != nil || p.Bits() < 8 || strings.HasPrefix(link, cfg.linkPrefix()) {
		return use{}, false
	}
	text := "route " + p.String()
	if link != "" {
		text += " dev " + link
	}
	return use{p, text}, true
}

func linkNames(nl *netlink.Handle) (map[int]string, error) {
	links, err := nl.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	names := map[int]string{}
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	return names, nil
}
