package networkagent

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
)

const forwardSysctl = "/proc/sys/net/ipv4/ip_forward"

// newRoutes opens a netlink socket in the calling thread's network namespace.
func newRoutes() (*netlink.Handle, error) {
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	return nl, nil
}

// claimPrefix chooses the node's prefix and reserves it on the host. The table that
// names the prefix is written first and the route second, which only one node can add:
// a crash between the two leaves a table that the next start of this node reads.
func claimPrefix(cfg Config) (netip.Prefix, error) {
	nl, err := newRoutes()
	if err != nil {
		return netip.Prefix{}, err
	}
	defer nl.Close()
	nodes, err := nodePrefixes()
	if err != nil {
		return netip.Prefix{}, err
	}
	used, err := usedRanges(nl, cfg, nodes)
	if err != nil {
		return netip.Prefix{}, err
	}
	former := nodes[cfg.tableName()]
	free, err := choices(cfg.HostPrefix, former, used)
	if err != nil {
		return netip.Prefix{}, err
	}
	for _, p := range free {
		if err := apply(hostRules(cfg.tableName(), cfg.linkPrefix(), p)); err != nil {
			return netip.Prefix{}, err
		}
		err := nl.RouteAdd(reservation(p))
		if err == nil || (errors.Is(err, unix.EEXIST) && p == former) {
			return p, dropReservation(nl, former, p)
		}
		if !errors.Is(err, unix.EEXIST) {
			return netip.Prefix{}, fmt.Errorf("reserve %s: %w", p, err)
		}
	}
	err = removeTable(cfg.tableName())
	return netip.Prefix{}, errors.Join(cube.Errorf(cube.CodeFailedPrecondition,
		"every free address range was taken by another node meanwhile, the last was %s", free[len(free)-1]), err)
}

// reservation is the route that keeps a prefix: packets for addresses without a sandbox
// go nowhere, and whoever looks for a free range sees that this one is not.
func reservation(p netip.Prefix) *netlink.Route {
	return &netlink.Route{
		Dst:      ipNet(p),
		Type:     unix.RTN_UNREACHABLE,
		Table:    unix.RT_TABLE_MAIN,
		Protocol: routeProtocol,
	}
}

// dropReservation takes back the former prefix unless it is still the current one.
func dropReservation(nl *netlink.Handle, former, current netip.Prefix) error {
	if !former.IsValid() || former == current {
		return nil
	}
	if err := nl.RouteDel(reservation(former)); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("give back %s: %w", former, err)
	}
	return nil
}

// repairHost makes the host's rules, reservation and forwarding what they must be, and
// tells in words what was not.
func repairHost(cfg Config, prefix netip.Prefix) ([]string, error) {
	found, err := hostDiffers(cfg, prefix)
	if err != nil || len(found) == 0 {
		return nil, err
	}
	if err := apply(hostRules(cfg.tableName(), cfg.linkPrefix(), prefix)); err != nil {
		return found, err
	}
	nl, err := newRoutes()
	if err != nil {
		return found, err
	}
	defer nl.Close()
	if err := nl.RouteAdd(reservation(prefix)); err != nil && !errors.Is(err, unix.EEXIST) {
		return found, fmt.Errorf("reserve %s: %w", prefix, err)
	}
	_, err = enableForwarding()
	return found, err
}

func hostDiffers(cfg Config, prefix netip.Prefix) ([]string, error) {
	var found []string
	text, err := differs(hostRules(cfg.tableName(), cfg.linkPrefix(), prefix))
	if err != nil {
		return nil, err
	}
	if text != "" {
		found = append(found, text)
	}
	reserved, err := isReserved(prefix)
	if err != nil {
		return nil, err
	}
	if !reserved {
		found = append(found, fmt.Sprintf("the route that reserves %s is missing", prefix))
	}
	on, err := forwarding()
	if err != nil {
		return nil, err
	}
	if !on {
		found = append(found, forwardSysctl+" is not 1: sandboxes reach nothing")
	}
	return found, nil
}

func isReserved(p netip.Prefix) (bool, error) {
	nl, err := newRoutes()
	if err != nil {
		return false, err
	}
	defer nl.Close()
	routes, err := nl.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Protocol: routeProtocol}, netlink.RT_FILTER_PROTOCOL)
	if err != nil {
		return false, fmt.Errorf("list host routes: %w", err)
	}
	for _, r := range routes {
		if r.Dst != nil && r.Dst.String() == p.String() {
			return true, nil
		}
	}
	return false, nil
}

func forwarding() (bool, error) {
	b, err := os.ReadFile(forwardSysctl)
	if err != nil {
		return false, err
	}
	return string(bytes.TrimSpace(b)) == "1", nil
}

// enableForwarding lets the host forward IPv4 packets and reports whether it changed
// anything.
func enableForwarding() (bool, error) {
	on, err := forwarding()
	if err != nil || on {
		return false, err
	}
	return true, os.WriteFile(forwardSysctl, []byte("1"), 0)
}

// releaseHost removes the node's rules and reservation.
func releaseHost(cfg Config, prefix netip.Prefix) error {
	nl, err := newRoutes()
	if err != nil {
		return err
	}
	defer nl.Close()
	// The table goes last: it is what names the reservation after a crash.
	if err := dropReservation(nl, prefix, netip.Prefix{}); err != nil {
		return err
	}
	return removeTable(cfg.tableName())
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
