package networkagent

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
)

const (
	tapName    = "tap0"    // in every sandbox's namespace, the guest's side
	uplinkName = "uplink0" // in every sandbox's namespace, the host's side
	nsfsMagic  = 0x6e736673

	carrierTimeout = 5 * time.Second
	carrierPoll    = time.Millisecond
)

// guestMAC is the network card of every guest.
func guestMAC() net.HardwareAddr { return net.HardwareAddr{0x02, 0xcb, 0, 0, 0, 0x01} }

// gatewayMAC is the same in every namespace: a restored guest has its gateway's
// hardware address in memory and keeps sending to it.
func gatewayMAC() net.HardwareAddr { return net.HardwareAddr{0x02, 0xcb, 0, 0, 0, 0xfe} }

// defaultAddresses are the gateway and the guest of every sandbox.
func defaultAddresses() (gateway, guest netip.Prefix) {
	gateway, guest, err := cube.NetworkSpec{}.Addresses()
	if err != nil {
		panic(err) // the constant is wrong
	}
	return gateway, guest
}

// slot is a namespace with a tap device that belongs to nobody yet.
type slot struct {
	name string
	tap  *os.File
}

// workshop makes and destroys slots. It keeps no state: a slot is its pinned namespace
// at RunDir/<name> and its host link <name>.
type workshop struct {
	cfg  Config
	home *os.File // the host's network namespace
}

// make builds the slot of an index. Everything of it bears its name from the first
// moment, so that destroy finds it however far make came. CodeAlreadyExists when the
// name is taken.
func (w workshop) make(prefix netip.Prefix, index int) (*slot, error) {
	name := w.cfg.slotName(index)
	path := w.cfg.slotPath(name)
	pin, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return nil, cube.Errorf(cube.CodeAlreadyExists, "network slot %s exists", name)
	}
	if err != nil {
		return nil, fmt.Errorf("make network slot %s: %w", name, err)
	}
	pin.Close()
	tap, err := w.build(name, prefix, index)
	if err != nil {
		err = fmt.Errorf("make network slot %s: %w", name, err)
		return nil, errors.Join(err, w.destroy(name))
	}
	return &slot{name: name, tap: tap}, nil
}

func (w workshop) build(name string, prefix netip.Prefix, index int) (*os.File, error) {
	path := w.cfg.slotPath(name)
	var tap *os.File
	var within *netlink.Handle
	err := onThread(w.home, func() (err error) {
		if tap, err = newNamespace(path); err != nil {
			return err
		}
		within, err = newRoutes()
		return err
	})
	if err == nil {
		defer within.Close()
		hostEnd, insideEnd := pair(prefix, index)
		err = connectHost(name, path, hostEnd)
		if err == nil {
			err = configureInside(within, hostEnd.Addr(), insideEnd)
		}
		if err == nil {
			err = awaitCarrier(name)
		}
	}
	if err != nil && tap != nil {
		tap.Close()
	}
	if err != nil {
		return nil, err
	}
	return tap, nil
}

// newNamespace moves the calling thread to a new network namespace, pins it at path and
// makes the tap device and the rules in it.
func newNamespace(path string) (*os.File, error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return nil, fmt.Errorf("new network namespace: %w", err)
	}
	if err := unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, ""); err != nil {
		return nil, fmt.Errorf("pin network namespace: %w", err)
	}
	if err := setSysctls(); err != nil {
		return nil, err
	}
	if err := apply(guestRules()); err != nil {
		return nil, err
	}
	return openTap(tapName)
}

// setSysctls sets up the calling thread's namespace before it has any link: no IPv6,
// forwarding, sources checked against routes, and ARP answered only for the address of
// the link that is asked.
func setSysctls() error {
	const dir = "/proc/sys/net/"
	for _, kv := range [...][2]string{
		{"ipv6/conf/all/disable_ipv6", "1"},
		{"ipv6/conf/default/disable_ipv6", "1"},
		{"ipv4/ip_forward", "1"},
		{"ipv4/conf/all/rp_filter", "1"},
		{"ipv4/conf/all/arp_ignore", "1"},
		{"ipv4/conf/all/accept_redirects", "0"},
		{"ipv4/conf/all/send_redirects", "0"},
		{"ipv4/conf/default/send_redirects", "0"},
		{"ipv4/conf/all/accept_source_route", "0"},
	} {
		err := os.WriteFile(dir+kv[0], []byte(kv[1]), 0)
		if errors.Is(err, fs.ErrNotExist) && strings.HasPrefix(kv[0], "ipv6/") {
			continue // a kernel without IPv6 has nothing to switch off
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// connectHost makes the pair of links between the host and the namespace pinned at path
// and sets up the host's end.
func connectHost(name, path string, addr netip.Prefix) error {
	ns, err := os.Open(path)
	if err != nil {
		return err
	}
	defer ns.Close()
	nl, err := newRoutes()
	if err != nil {
		return err
	}
	defer nl.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	link := netlink.NewVeth(attrs)
	link.PeerName = uplinkName
	link.PeerNamespace = netlink.NsFd(int(ns.Fd()))
	if err := nl.LinkAdd(link); err != nil {
		return fmt.Errorf("add link: %w", err)
	}
	err = os.WriteFile("/proc/sys/net/ipv6/conf/"+name+"/disable_ipv6", []byte("1"), 0)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return bringUp(nl, name, addr)
}

// bringUp sets a link's address and switches it on.
func bringUp(nl *netlink.Handle, name string, addr netip.Prefix) error {
	link, err := nl.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find link %s: %w", name, err)
	}
	if addr.IsValid() {
		if err := nl.AddrAdd(link, &netlink.Addr{IPNet: ipNet(addr)}); err != nil {
			return fmt.Errorf("set address %s of %s: %w", addr, name, err)
		}
	}
	if err := nl.LinkSetUp(link); err != nil {
		return fmt.Errorf("switch on %s: %w", name, err)
	}
	return nil
}

// awaitCarrier returns when the host's end of a link passes packets. The kernel notices
// in the background that the other end was switched on, and drops packets until then.
func awaitCarrier(name string) error {
	nl, err := newRoutes()
	if err != nil {
		return err
	}
	defer nl.Close()
	for end := time.Now().Add(carrierTimeout); ; time.Sleep(carrierPoll) {
		link, err := nl.LinkByName(name)
		if err != nil {
			return fmt.Errorf("find link %s: %w", name, err)
		}
		if link.Attrs().OperState == netlink.OperUp {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("link %s is still %s after %v", name, link.Attrs().OperState, carrierTimeout)
		}
	}
}

// configureInside gives the links in a namespace their addresses and its route out.
func configureInside(nl *netlink.Handle, hostEnd netip.Addr, insideEnd netip.Prefix) error {
	if err := bringUp(nl, "lo", netip.Prefix{}); err != nil {
		return err
	}
	if err := bringUp(nl, uplinkName, insideEnd); err != nil {
		return err
	}
	if err := nl.RouteAdd(&netlink.Route{Gw: hostEnd.AsSlice()}); err != nil {
		return fmt.Errorf("add default route: %w", err)
	}
	tap, err := nl.LinkByName(tapName)
	if err != nil {
		return fmt.Errorf("find link %s: %w", tapName, err)
	}
	if err := nl.LinkSetHardwareAddr(tap, gatewayMAC()); err != nil {
		return fmt.Errorf("set hardware address of %s: %w", tapName, err)
	}
	gateway, guest := defaultAddresses()
	if err := bringUp(nl, tapName, gateway); err != nil {
		return err
	}
	return greetGuest(nl, tap, guest.Addr())
}

// greetGuest tells the neighbour table where the guest is expected, which saves the
// first packet a question. The entry is stale from the start: the kernel uses it, then
// verifies it, and asks for the address if the guest is elsewhere.
func greetGuest(nl *netlink.Handle, tap netlink.Link, guest netip.Addr) error {
	err := nl.NeighSet(&netlink.Neigh{
		LinkIndex:    tap.Attrs().Index,
		Family:       unix.AF_INET,
		State:        netlink.NUD_STALE,
		IP:           guest.AsSlice(),
		HardwareAddr: guestMAC(),
	})
	if err != nil {
		return fmt.Errorf("add neighbour %s: %w", guest, err)
	}
	return nil
}

// readdress adds a spec's own subnet to the slot. The default one stays, since a guest
// restored from a template has it until its agent is told of the other.
func (w workshop) readdress(name string, gateway, guest netip.Prefix) error {
	return inside(w.home, w.cfg.slotPath(name), func() error {
		nl, err := newRoutes()
		if err != nil {
			return err
		}
		defer nl.Close()
		tap, err := nl.LinkByName(tapName)
		if err != nil {
			return fmt.Errorf("find link %s: %w", tapName, err)
		}
		if err := nl.AddrAdd(tap, &netlink.Addr{IPNet: ipNet(gateway)}); err != nil {
			return fmt.Errorf("set address %s of %s: %w", gateway, tapName, err)
		}
		if err := allow(guest.Addr()); err != nil {
			return err
		}
		return greetGuest(nl, tap, guest.Addr())
	})
}

// destroy removes what there is of a slot and returns when its host link is gone. The
// namespace itself ends with the last descriptor of its tap.
func (w workshop) destroy(name string) error {
	if err := removeLink(name); err != nil {
		return fmt.Errorf("remove network slot %s: %w", name, err)
	}
	path := w.cfg.slotPath(name)
	err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("remove network slot %s: unpin: %w", name, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove network slot %s: %w", name, err)
	}
	return nil
}

func removeLink(name string) error {
	nl, err := newRoutes()
	if err != nil {
		return err
	}
	defer nl.Close()
	link, err := nl.LinkByName(name)
	var gone netlink.LinkNotFoundError
	if errors.As(err, &gone) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("find link: %w", err)
	}
	if err := nl.LinkDel(link); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete link: %w", err)
	}
	return nil
}

// openNamespace opens a pinned namespace. CodeNotFound when path is none.
func openNamespace(path string) (*os.File, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, cube.Errorf(cube.CodeNotFound, "no network namespace at %s", path)
	}
	if err != nil {
		return nil, err
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		f.Close()
		return nil, err
	}
	if st.Type != nsfsMagic {
		f.Close()
		return nil, cube.Errorf(cube.CodeNotFound, "no network namespace at %s", path)
	}
	return f, nil
}
