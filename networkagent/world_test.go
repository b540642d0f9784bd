package networkagent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

const (
	siteAddr     = "203.0.113.10"    // a server on the internet
	metadataAddr = "169.254.169.254" // a cloud's metadata service
	hostAddr     = "198.51.100.2"
	hostLANAddr  = "192.168.77.1"
	routerAddr   = "198.51.100.1"
	patience     = 10 * time.Second       // for what must happen
	silence      = 400 * time.Millisecond // for what must not
)

// namespace is a network namespace of the test.
type namespace struct {
	home, file *os.File
}

func newNamespaceForTest(t testing.TB) namespace {
	t.Helper()
	home, err := os.Open("/proc/thread-self/ns/net")
	must(t, err)
	ns := namespace{home: home}
	must(t, onThread(home, func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		ns.file, err = os.Open("/proc/thread-self/ns/net")
		return err
	}))
	t.Cleanup(func() {
		ns.file.Close()
		home.Close()
	})
	return ns
}

// do runs fn on a thread in the namespace.
func (ns namespace) do(fn func() error) error {
	return onThread(ns.home, func() error {
		if err := unix.Setns(int(ns.file.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		return fn()
	})
}

// dial opens a TCP connection from inside the namespace.
func (ns namespace) dial(addr string) (net.Conn, error) { return ns.dialFor(addr, patience) }

func (ns namespace) dialFor(addr string, timeout time.Duration) (conn net.Conn, err error) {
	err = ns.do(func() error {
		conn, err = (&net.Dialer{Timeout: timeout}).Dial("tcp4", addr)
		return err
	})
	return conn, err
}

// cannotReach fails the test when any of the addresses answers, all tried at once.
func (ns namespace) cannotReach(t testing.TB, addrs ...string) {
	t.Helper()
	var wg sync.WaitGroup
	for _, addr := range addrs {
		wg.Go(func() {
			if c, err := ns.dialFor(addr, silence); err == nil {
				c.Close()
				t.Errorf("%s was reached", addr)
			}
		})
	}
	wg.Wait()
}

// listen serves TCP in the namespace with handle until the test ends.
func (ns namespace) listen(t testing.TB, addr string, handle func(net.Conn)) {
	t.Helper()
	var l net.Listener
	must(t, ns.do(func() (err error) {
		l, err = net.Listen("tcp4", addr)
		return err
	}))
	serve(t, l, handle)
}

func serve(t testing.TB, l net.Listener, handle func(net.Conn)) {
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				handle(c)
			}()
		}
	})
	t.Cleanup(func() {
		l.Close()
		wg.Wait()
	})
}

func echo(c net.Conn) { _, _ = io.Copy(c, c) }

// world is the host (the test process's own namespace), with an uplink to an internet.
type world struct {
	internet namespace
}

// newWorld gives the host two addresses, servers on all of them, and an internet with a
// site and a metadata service. The site answers an HTTP request with the address that
// it came from.
func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{internet: newNamespaceForTest(t)}
	nl, err := newRoutes()
	must(t, err)
	defer nl.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "eth0"
	link := netlink.NewVeth(attrs)
	link.PeerName = "eth0"
	link.PeerNamespace = netlink.NsFd(int(w.internet.file.Fd()))
	must(t, nl.LinkAdd(link))
	t.Cleanup(func() { must(t, removeLink("eth0")) })
	must(t, bringUp(nl, "lo", netip.Prefix{}))
	must(t, bringUp(nl, "eth0", netip.MustParsePrefix(hostAddr+"/24")))
	must(t, bringUp(nl, "eth0", netip.MustParsePrefix(hostLANAddr+"/24")))
	must(t, nl.RouteAdd(&netlink.Route{Gw: net.ParseIP(routerAddr)}))
	must(t, w.internet.do(func() error {
		nl, err := newRoutes()
		if err != nil {
			return err
		}
		defer nl.Close()
		for _, a := range []string{siteAddr, metadataAddr} {
			if err := bringUp(nl, "lo", netip.MustParsePrefix(a+"/32")); err != nil {
				return err
			}
		}
		return bringUp(nl, "eth0", netip.MustParsePrefix(routerAddr+"/24"))
	}))
	must(t, awaitCarrier("eth0"))
	w.serveSite(t)
	l, err := net.Listen("tcp4", ":8080")
	must(t, err)
	serve(t, l, echo)
	return w
}

func (w *world) serveSite(t testing.TB) {
	var l net.Listener
	must(t, w.internet.do(func() (err error) {
		l, err = net.Listen("tcp4", ":80")
		return err
	}))
	site := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		host, _, _ := net.SplitHostPort(r.RemoteAddr)
		fmt.Fprint(rw, host)
	})}
	go site.Serve(l)
	t.Cleanup(func() { site.Close() })
}

// guest is a machine with a network card at the other end of a tap.
type guest struct {
	namespace
}

// newGuest makes the machine and gives it the default address, or the given ones; its
// default route is the first host of the first address's subnet.
func newGuest(t testing.TB, tap *os.File, addrs ...netip.Prefix) *guest {
	t.Helper()
	g := &guest{newNamespaceForTest(t)}
	var card *os.File
	must(t, g.do(func() (err error) {
		card, err = openTap("eth0")
		if err != nil {
			return err
		}
		return setUpCard(addrs)
	}))
	var wg sync.WaitGroup
	for _, way := range [][2]*os.File{{tap, card}, {card, tap}} {
		wg.Go(func() { pump(way[0], way[1]) })
	}
	t.Cleanup(func() {
		tap.Close()
		card.Close()
		wg.Wait()
	})
	return g
}

func setUpCard(addrs []netip.Prefix) error {
	if len(addrs) == 0 {
		_, usual := defaultAddresses()
		addrs = []netip.Prefix{usual}
	}
	nl, err := newRoutes()
	if err != nil {
		return err
	}
	defer nl.Close()
	card, err := nl.LinkByName("eth0")
	if err != nil {
		return err
	}
	if err := nl.LinkSetHardwareAddr(card, guestMAC()); err != nil {
		return err
	}
	if err := bringUp(nl, "lo", netip.Prefix{}); err != nil {
		return err
	}
	for _, a := range addrs {
		if err := bringUp(nl, "eth0", a); err != nil {
			return err
		}
	}
	gateway := addrs[0].Masked().Addr().Next()
	return nl.RouteAdd(&netlink.Route{Gw: gateway.AsSlice()})
}

// pump copies frames until one of the files is closed.
func pump(from, to *os.File) {
	frame := make([]byte, 1<<17)
	for {
		n, err := from.Read(frame)
		if err != nil {
			return
		}
		if _, err := to.Write(frame[:n]); err != nil && !errors.Is(err, unix.EIO) { // EIO: the card is not switched on yet
			return
		}
	}
}

// get asks the site and returns what it answers.
func (g *guest) get(addr string) (string, error) {
	c, err := g.dial(addr + ":80")
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := fmt.Fprintf(c, "GET / HTTP/1.0\r\nHost: %s\r\n\r\n", addr); err != nil {
		return "", err
	}
	b, err := io.ReadAll(c)
	if err != nil {
		return "", err
	}
	_, body, _ := cutHeader(b)
	return body, nil
}

func cutHeader(b []byte) (head, body string, ok bool) {
	for i := 0; i+4 <= len(b); i++ {
		if string(b[i:i+4]) == "\r\n\r\n" {
			return string(b[:i]), string(b[i+4:]), true
		}
	}
	return string(b), "", false
}

// echoes proves that a connection to an echo server works.
func echoes(c net.Conn) error {
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if _, err := c.Write([]byte("ping")); err != nil {
		return err
	}
	b := make([]byte, 4)
	_, err := io.ReadFull(c, b)
	return err
}

func testConfig(t testing.TB, node string) Config {
	t.Helper()
	out := io.Writer(testWriter{t})
	return Config{
		RunDir: filepath.Join(testenv.TempRoot(t), node),
		Node:   node,
		Log:    slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{Level: slog.LevelWarn})),
	}
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Logf("%s", b)
	return len(b), nil
}

// start makes an agent that has taken over from nobody and is closed with the test.
func start(t testing.TB, cfg Config) *Agent {
	t.Helper()
	a, err := New(cfg)
	must(t, err)
	t.Cleanup(func() { closeAgent(t, a) })
	must(t, a.Adopt(context.Background(), nil))
	a.Start(context.Background())
	return a
}

// closeAgent releases everything and sees that nothing stays behind.
func closeAgent(t testing.TB, a *Agent) {
	t.Helper()
	owners, err := a.List(context.Background())
	must(t, err)
	for _, o := range owners {
		must(t, a.Release(context.Background(), o))
	}
	must(t, a.Close())
	found, err := Inspect(a.cfg, nil)
	must(t, err)
	if len(found) > 0 {
		t.Errorf("after Close: %v", found)
	}
	if nodes, err := nodePrefixes(); err != nil || nodes[a.cfg.tableName()].IsValid() {
		t.Errorf("after Close: tables %v, %v", nodes, err)
	}
	if left, err := isReserved(a.prefix); err != nil || left {
		t.Errorf("after Close: reserved %v, %v", left, err)
	}
}

func claimFor(t testing.TB, a *Agent, owner string, spec cube.NetworkSpec) *os.File {
	t.Helper()
	tap, err := a.Claim(context.Background(), owner, spec)
	must(t, err)
	return tap
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// readable reports whether a frame waits in the tap.
func readable(tap *os.File) error {
	fds := []unix.PollFd{{Fd: int32(tap.Fd()), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	if err == nil && n == 0 {
		err = fmt.Errorf("no frame")
	}
	if err == nil {
		err = unix.SetNonblock(int(tap.Fd()), true)
	}
	return err
}
