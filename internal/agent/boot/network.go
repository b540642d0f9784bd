package boot

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	nic = "eth0"
	// nicOwn labels the address of the sandbox's own subnet.
	nicOwn = nic + ":cube"
)

// setUpLink gives eth0 the address that every guest has, and the default gateway. The
// namespace outside has no IPv6, so neither has the link: a resolver must not try it.
func setUpLink(address, gateway string) error {
	off := "/proc/sys/net/ipv6/conf/" + nic + "/disable_ipv6"
	if err := os.WriteFile(off, []byte("1"), 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("switch IPv6 off: %w", err)
	}
	if err := addAddress(nic, address); err != nil {
		return err
	}
	return replaceDefaultRoute(gateway)
}

// SetAddress gives eth0 one more IPv4 address with its prefix length, in place of an
// earlier one that was set so, and makes gateway the default one. The address that every
// guest has stays: the host's own connections, this one among them, go there.
func (m *Machine) SetAddress(address, gateway string) error {
	if err := addAddress(nicOwn, address); err != nil {
		return err
	}
	if gateway == "" {
		return nil
	}
	return replaceDefaultRoute(gateway)
}

// addAddress sets the address of an interface or of one of its labels, and brings the
// interface up.
func addAddress(label, address string) error {
	p, err := netip.ParsePrefix(address)
	if err != nil {
		return err
	}
	if !p.Addr().Is4() {
		return fmt.Errorf("address %s: only IPv4 is supported", address)
	}
	mask := ^uint32(0) << (32 - p.Bits())
	netmask := netip.AddrFrom4([4]byte{byte(mask >> 24), byte(mask >> 16), byte(mask >> 8), byte(mask)})
	if err := setInet4(label, unix.SIOCSIFADDR, p.Addr()); err != nil {
		return fmt.Errorf("set address of %s: %w", label, err)
	}
	if err := setInet4(label, unix.SIOCSIFNETMASK, netmask); err != nil {
		return fmt.Errorf("set netmask of %s: %w", label, err)
	}
	if err := setUp(label); err != nil {
		return fmt.Errorf("set up %s: %w", label, err)
	}
	return nil
}

// replaceDefaultRoute makes gateway the only default gateway.
func replaceDefaultRoute(gateway string) error {
	if gateway == "" {
		return nil
	}
	gw, err := netip.ParseAddr(gateway)
	if err != nil {
		return err
	}
	if !gw.Is4() {
		return fmt.Errorf("gateway %s is not an IPv4 address", gw)
	}
	for {
		err := changeDefaultRoute(unix.SIOCDELRT, netip.IPv4Unspecified())
		if errors.Is(err, unix.ESRCH) {
			break
		}
		if err != nil {
			return fmt.Errorf("remove default route: %w", err)
		}
	}
	if err := changeDefaultRoute(unix.SIOCADDRT, gw); err != nil {
		return fmt.Errorf("add default route via %s: %w", gw, err)
	}
	return nil
}

// withSocket calls f with a socket for ioctls.
func withSocket(f func(fd int) error) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	return f(fd)
}

func setInet4(nic string, request uint, addr netip.Addr) error {
	req, err := unix.NewIfreq(nic)
	if err != nil {
		return err
	}
	b := addr.As4()
	if err := req.SetInet4Addr(b[:]); err != nil {
		return err
	}
	return withSocket(func(fd int) error { return unix.IoctlIfreq(fd, request, req) })
}

func setUp(nic string) error {
	req, err := unix.NewIfreq(nic)
	if err != nil {
		return err
	}
	return withSocket(func(fd int) error {
		if err := unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, req); err != nil {
			return err
		}
		req.SetUint16(req.Uint16() | unix.IFF_UP | unix.IFF_RUNNING)
		return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, req)
	})
}

// rtentry is struct rtentry of linux/route.h on 64-bit machines.
type rtentry struct {
	_                     uint64
	dst, gateway, genmask unix.RawSockaddrInet4
	flags                 uint16
	_                     int16
	_                     uint64
	_                     uintptr
	metric                int16
	dev                   uintptr
	mtu, window           uint64
	irtt                  uint16
}

// changeDefaultRoute adds a default route via gw, or removes one; the unspecified address
// stands for any gateway then.
func changeDefaultRoute(request uintptr, gw netip.Addr) error {
	any4 := unix.RawSockaddrInet4{Family: unix.AF_INET}
	rt := rtentry{dst: any4, gateway: any4, genmask: any4, flags: unix.RTF_UP}
	if !gw.IsUnspecified() {
		rt.flags |= unix.RTF_GATEWAY
		rt.gateway.Addr = gw.As4()
	}
	return withSocket(func(fd int) error {
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(unsafe.Pointer(&rt))); errno != 0 {
			return errno
		}
		return nil
	})
}
