package networkagent

import (
	"bufio"
	"bytes"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
)

// hostResolvers returns the name servers of the host that a guest can reach: not those
// on the host itself (systemd-resolved's own upstreams stand in for it), not link-local
// ones. Without any, two public ones.
func hostResolvers(nl *netlink.Handle) []netip.Addr {
	local := map[netip.Addr]bool{}
	addrs, err := nl.AddrList(nil, netlink.FAMILY_V4)
	if err == nil { // without the list a guest may be told a resolver that it cannot reach
		for _, a := range addrs {
			if ip, ok := netip.AddrFromSlice(a.IP); ok {
				local[ip.Unmap()] = true
			}
		}
	}
	for _, path := range []string{"/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"} {
		b, err := os.ReadFile(path)
		if err != nil {
			continue
		}
		usable := slices.DeleteFunc(parseResolvConf(b), func(a netip.Addr) bool {
			return !a.Is4() || a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsUnspecified() || local[a]
		})
		if len(usable) > 0 {
			return usable
		}
	}
	return []netip.Addr{netip.AddrFrom4([4]byte{1, 1, 1, 1}), netip.AddrFrom4([4]byte{8, 8, 8, 8})}
}

// parseResolvConf returns the name servers of a resolv.conf in order.
func parseResolvConf(b []byte) []netip.Addr {
	var found []netip.Addr
	lines := bufio.NewScanner(bytes.NewReader(b))
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if len(f) < 2 || f[0] != "nameserver" {
			continue
		}
		if a, err := netip.ParseAddr(f[1]); err == nil {
			found = append(found, a)
		}
	}
	return found
}
