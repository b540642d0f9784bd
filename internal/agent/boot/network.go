package boot

import (
	"fmt"
	"net/netip"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// SetAddress gives eth0 an IPv4 address with its prefix length, in place of the one it
// has, and the default gateway.
func (m *Machine) SetAddress(address, gateway string) error {
	const nic = "eth0"
	p, err := netip.ParsePrefix(address)
	if err != nil {
		return err
	}
	if !p.Addr().Is4() {
		return fmt.Errorf("address %s: only IPv4 is supported", address)
	}
	mask := ^uint32(0) << (32 - p.Bits())
	netmask := netip.AddrFrom4([4]byte{byte(mask >> 24), byte(mask >> 16), byte(mask >> 8), byte(mask)})
	if err := setInet4(nic, unix.SIOCSIFADDR, p.Addr()); err != nil {
		return fmt.Errorf("set address of %s: %w", nic, err)
	}
	if err := setInet4(nic, unix.SIOCSIFNETMASK, netmask); err != nil {
		return fmt.Errorf("set netmask of %s: %w", nic, err)
	}
	if err := setUp(nic); err != nil {
		return fmt.Errorf("set up %s: %w", nic, err)
	}
	if gateway == "" {
		return nil
	}
	gw, err := netip.ParseAddr(gateway)
	if err != nil {
		return err
	}
	if err := addDefaultRoute(gw); err != nil {
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

func addDefaultRoute(gw netip.Addr) error {
	if !gw.Is4() {
		return fmt.Errorf("%s is not an IPv4 address", gw)
	}
	any4 := unix.RawSockaddrInet4{Family: unix.AF_INET}
	rt := rtentry{dst: any4, gateway: any4, genmask: any4, flags: unix.RTF_UP | unix.RTF_GATEWAY}
	rt.gateway.Addr = gw.As4()
	return withSocket(func(fd int) error {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCADDRT, uintptr(unsafe.Pointer(&rt)))
		if errno != 0 && errno != unix.EEXIST {
			return errno
		}
		return nil
	})
}
