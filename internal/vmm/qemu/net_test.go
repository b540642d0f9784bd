package qemu

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
)

// guestNet is a network namespace of its own with a tap in it.
type guestNet struct {
	t   testing.TB
	ns  netns.NsHandle
	tap *os.File
}

func newGuestNet(t testing.TB) *guestNet {
	t.Helper()
	g := &guestNet{t: t}
	onThread(t, func() error {
		home, err := netns.Get()
		if err != nil {
			return err
		}
		defer home.Close()
		if g.ns, err = netns.New(); err != nil {
			return err
		}
		if g.tap, err = openTap("tap0"); err == nil {
			err = configureTap("tap0")
		}
		return firstError(err, netns.Set(home))
	})
	t.Cleanup(func() {
		_ = g.tap.Close()
		_ = g.ns.Close()
	})
	return g
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// onThread runs f on a thread that is thrown away when f could not put it back.
func onThread(t testing.TB, f func() error) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := f()
		if err == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// inside runs f in the namespace.
func (g *guestNet) inside(f func() error) {
	g.t.Helper()
	onThread(g.t, func() error {
		home, err := netns.Get()
		if err != nil {
			return err
		}
		defer home.Close()
		if err := netns.Set(g.ns); err != nil {
			return err
		}
		return firstError(f(), netns.Set(home))
	})
}

func openTap(name string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	req, err := unix.NewIfreq(name)
	if err != nil {
		return nil, err
	}
	req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, req); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("make tap: %w", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

func configureTap(name string) error {
	gateway, _, err := cube.NetworkSpec{}.Addresses()
	if err != nil {
		return err
	}
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	address, err := netlink.ParseAddr(gateway.String())
	if err != nil {
		return err
	}
	if err := netlink.AddrAdd(link, address); err != nil {
		return err
	}
	return netlink.LinkSetUp(link)
}

// dial connects to the test guest and waits for as long as it does not answer.
func (g *guestNet) dial() *guestConn {
	g.t.Helper()
	_, address, err := cube.NetworkSpec{}.Addresses()
	if err != nil {
		g.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), guestTimeout)
	defer cancel()
	var conn net.Conn
	g.inside(func() error {
		for {
			var d net.Dialer
			conn, err = d.DialContext(ctx, "tcp4", net.JoinHostPort(address.Addr().String(), "7"))
			if err == nil || ctx.Err() != nil {
				return err
			}
			<-time.After(20 * time.Millisecond)
		}
	})
	g.t.Cleanup(func() { _ = conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(guestTimeout)); err != nil {
		g.t.Fatal(err)
	}
	return &guestConn{t: g.t, conn: conn, in: bufio.NewReader(conn)}
}

// guestConn speaks the protocol of testguest.
type guestConn struct {
	t    testing.TB
	conn net.Conn
	in   *bufio.Reader
}

func (c *guestConn) ask(request string) string {
	c.t.Helper()
	if _, err := fmt.Fprintln(c.conn, request); err != nil {
		c.t.Fatalf("ask the guest %q: %v", request, err)
	}
	line, err := c.in.ReadString('\n')
	if err != nil {
		c.t.Fatalf("ask the guest %q: %v", request, err)
	}
	return strings.TrimSpace(line)
}

func (c *guestConn) must(request, want string) {
	c.t.Helper()
	if got := c.ask(request); got != want {
		c.t.Errorf("guest answers %q to %q; want %q", got, request, want)
	}
}

func (c *guestConn) ticks() int {
	c.t.Helper()
	var n int
	if _, err := fmt.Sscan(c.ask("tick"), &n); err != nil {
		c.t.Fatal(err)
	}
	return n
}

// transfer sends size bytes to the guest and receives as many.
func (c *guestConn) transfer(size int) {
	c.t.Helper()
	fmt.Fprintf(c.conn, "sink %d\n", size)
	if _, err := c.conn.Write(make([]byte, size)); err != nil {
		c.t.Fatalf("send to the guest: %v", err)
	}
	if line, err := c.in.ReadString('\n'); err != nil || strings.TrimSpace(line) != fmt.Sprint(size) {
		c.t.Fatalf("guest received %q, %v; want %d", line, err, size)
	}
	fmt.Fprintf(c.conn, "source %d\n", size)
	if n, err := io.CopyN(io.Discard, c.in, int64(size)); err != nil {
		c.t.Fatalf("received %d of %d bytes: %v", n, size, err)
	}
}

// offloads reports whether the tap leaves checksums and segmentation to the guest:
// what QEMU tells the kernel with TUNSETOFFLOAD.
func (g *guestNet) offloads() (checksum, segmentation bool) {
	g.t.Helper()
	g.inside(func() error {
		var err error
		if checksum, err = ethtoolFlag("tap0", unix.ETHTOOL_GTXCSUM); err == nil {
			segmentation, err = ethtoolFlag("tap0", unix.ETHTOOL_GTSO)
		}
		return err
	})
	return checksum, segmentation
}

func ethtoolFlag(name string, command uint32) (bool, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	value := [2]uint32{command, 0}
	var req struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}
	copy(req.name[:], name)
	req.data = unsafe.Pointer(&value)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req)))
	if errno != 0 {
		return false, fmt.Errorf("ethtool %#x: %w", command, errno)
	}
	return value[1] != 0, nil
}
