package networkagent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

func TestGuestReachesTheInternetAsTheHost(t *testing.T) {
	newWorld(t)
	a := start(t, testConfig(t, "t"))
	g := newGuest(t, claimFor(t, a, "one", cube.NetworkSpec{}))
	from, err := g.get(siteAddr)
	must(t, err)
	if from != hostAddr {
		t.Errorf("the site was called from %q, want the host's address %s", from, hostAddr)
	}
}

func TestGuestReachesNeitherHostNorMetadataNorAnotherSandbox(t *testing.T) {
	newWorld(t)
	a := start(t, testConfig(t, "t"))
	g := newGuest(t, claimFor(t, a, "one", cube.NetworkSpec{}))
	newGuest(t, claimFor(t, a, "two", cube.NetworkSpec{})).listen(t, ":8080", echo)
	hostEnd, insideEnd := endsOf(t, a, "two")
	ownHostEnd, ownInsideEnd := endsOf(t, a, "one")
	g.cannotReach(t,
		hostAddr+":8080", hostLANAddr+":8080",
		hostEnd.String()+":8080", ownHostEnd.String()+":8080",
		insideEnd.String()+":8080", ownInsideEnd.String()+":8080",
		metadataAddr+":80")
	_, err := g.get(siteAddr)
	must(t, err)
}

// Without its own namespace's rules a sandbox must still not reach another: the host's
// rules hold alone. The last part proves that the test would see it if they did not.
func TestHostRulesKeepSandboxesApartOnTheirOwn(t *testing.T) {
	newWorld(t)
	a := start(t, testConfig(t, "t"))
	g := newGuest(t, claimFor(t, a, "one", cube.NetworkSpec{}))
	claimFor(t, a, "two", cube.NetworkSpec{}).Close()
	_, victim := endsOf(t, a, "two")
	var l net.Listener
	must(t, inside(a.shop.home, a.cfg.slotPath(slotOf(t, a, "two")), func() (err error) {
		l, err = net.Listen("tcp4", ":8080")
		return errors.Join(err, removeTable(guestTable))
	}))
	serve(t, l, echo)
	target := victim.String() + ":8080"
	g.cannotReach(t, target)
	must(t, removeTable(a.cfg.tableName()))
	c, err := g.dial(target)
	must(t, err)
	c.Close()
	must(t, a.Adopt(context.Background(), []string{"one", "two"}))
}

func TestNobodyOutsideReachesASandbox(t *testing.T) {
	w := newWorld(t)
	a := start(t, testConfig(t, "t"))
	newGuest(t, claimFor(t, a, "one", cube.NetworkSpec{})).listen(t, ":8080", echo)
	_, insideEnd := endsOf(t, a, "one")
	must(t, w.internet.do(func() error {
		nl, err := newRoutes()
		if err != nil {
			return err
		}
		defer nl.Close()
		return nl.RouteAdd(&netlink.Route{Dst: ipNet(a.Prefix()), Gw: net.ParseIP(hostAddr)})
	}))
	w.internet.cannotReach(t, insideEnd.String()+":8080")
}

func TestGuestSpeaksOnlyAsItself(t *testing.T) {
	w := newWorld(t)
	a := start(t, testConfig(t, "t"))
	g := newGuest(t, claimFor(t, a, "one", cube.NetworkSpec{}))
	const forged = "203.0.113.77"
	must(t, g.do(func() error {
		nl, err := newRoutes()
		if err != nil {
			return err
		}
		defer nl.Close()
		return bringUp(nl, "lo", netip.MustParsePrefix(forged+"/32"))
	}))
	var server net.PacketConn
	must(t, w.internet.do(func() (err error) {
		server, err = net.ListenPacket("udp4", siteAddr+":53")
		return err
	}))
	defer server.Close()
	// In this order: what is let through of the first arrives before the second.
	for _, from := range []string{forged, ""} {
		must(t, g.do(func() error {
			d := net.Dialer{}
			if from != "" {
				d.LocalAddr = &net.UDPAddr{IP: net.ParseIP(from)}
			}
			c, err := d.Dial("udp4", siteAddr+":53")
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = c.Write([]byte("from " + from))
			return err
		}))
	}
	b := make([]byte, 64)
	must(t, server.SetReadDeadline(time.Now().Add(patience)))
	n, _, err := server.ReadFrom(b)
	must(t, err)
	if got := string(b[:n]); got != "from " {
		t.Errorf("a packet %q with a forged address arrived", got)
	}
}

func TestGatewayAnswersAnEcho(t *testing.T) {
	newWorld(t)
	a := start(t, testConfig(t, "t"))
	g := newGuest(t, claimFor(t, a, "one", cube.NetworkSpec{}))
	gateway, _ := defaultAddresses()
	var c net.PacketConn
	must(t, g.do(func() (err error) {
		c, err = net.ListenPacket("ip4:icmp", "0.0.0.0")
		return err
	}))
	defer c.Close()
	request := []byte{8, 0, 0xf7, 0xff, 0, 0, 0, 0}
	_, err := c.WriteTo(request, &net.IPAddr{IP: gateway.Addr().AsSlice()})
	must(t, err)
	must(t, c.SetReadDeadline(time.Now().Add(patience)))
	b := make([]byte, 64)
	_, _, err = c.ReadFrom(b)
	must(t, err)
	if b[0] != 0 {
		t.Errorf("ICMP type %d, want an echo reply", b[0])
	}
}

func TestDialReachesAServerInTheGuest(t *testing.T) {
	newWorld(t)
	a := start(t, testConfig(t, "t"))
	newGuest(t, claimFor(t, a, "one", cube.NetworkSpec{})).listen(t, ":49983", echo)
	c, err := a.Dial(context.Background(), "one", 49983)
	must(t, err)
	defer c.Close()
	must(t, echoes(c))
	if got := c.RemoteAddr().String(); got != "169.254.0.22:49983" {
		t.Errorf("remote address %s", got)
	}
	if _, ok := c.(interface{ CloseWrite() error }); !ok {
		t.Error("the connection cannot be closed for writing alone")
	}
}

func TestDialTellsWhatIsWrong(t *testing.T) {
	newWorld(t)
	a := start(t, testConfig(t, "t"))
	newGuest(t, claimFor(t, a, "one", cube.NetworkSpec{}))
	claimFor(t, a, "silent", cube.NetworkSpec{}).Close()
	short, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	canceled, cancelNow := context.WithCancel(context.Background())
	cancelNow()
	for _, tc := range []struct {
		name  string
		ctx   context.Context
		owner string
		port  int
		want  cube.Code
	}{
		{"unknown owner", context.Background(), "nobody", 80, cube.CodeNotFound},
		{"no port", context.Background(), "one", 0, cube.CodeInvalid},
		{"port too high", context.Background(), "one", 65536, cube.CodeInvalid},
		{"nobody listens", context.Background(), "one", 81, cube.CodeUnavailable},
		{"no answer in time", short, "silent", 80, cube.CodeDeadlineExceeded},
		{"caller gone", canceled, "one", 80, cube.CodeCanceled},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, err := a.Dial(tc.ctx, tc.owner, tc.port)
			if err == nil {
				c.Close()
			}
			if got := cube.CodeOf(err); err == nil || got != tc.want {
				t.Errorf("%v (%v), want code %v", err, got, tc.want)
			}
		})
	}
	if _, err := a.Dial(context.Background(), "one", 81); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("%v does not tell that the connection was refused", err)
	}
}

func TestReleaseEndsConnectionsToTheGuest(t *testing.T) {
	newWorld(t)
	a := start(t, testConfig(t, "t"))
	newGuest(t, claimFor(t, a, "one", cube.NetworkSpec{})).listen(t, ":80", echo)
	c, err := a.Dial(context.Background(), "one", 80)
	must(t, err)
	must(t, echoes(c))
	must(t, a.Release(context.Background(), "one"))
	if err := echoes(c); !errors.Is(err, net.ErrClosed) {
		t.Errorf("after Release: %v, want a closed connection", err)
	}
	if _, err := a.Dial(context.Background(), "one", 80); !cube.IsNotFound(err) {
		t.Errorf("dial after Release: %v", err)
	}
}

func TestGuestMayHaveASubnetOfItsOwn(t *testing.T) {
	newWorld(t)
	a := start(t, testConfig(t, "t"))
	tap := claimFor(t, a, "one", cube.NetworkSpec{CIDR: "192.168.10.0/24"})
	own := netip.MustParsePrefix("192.168.10.2/24")
	g := newGuest(t, tap, own)
	from, err := g.get(siteAddr)
	must(t, err)
	if from != hostAddr {
		t.Errorf("the site was called from %q", from)
	}
	g.listen(t, own.Addr().String()+":80", echo)
	c, err := a.Dial(context.Background(), "one", 80)
	must(t, err)
	defer c.Close()
	must(t, echoes(c))
}

// A restored guest has its template's address until its agent is told of the new one.
func TestGuestWithItsOwnSubnetIsReachedBeforeItKnows(t *testing.T) {
	newWorld(t)
	a := start(t, testConfig(t, "t"))
	g := newGuest(t, claimFor(t, a, "one", cube.NetworkSpec{CIDR: "192.168.10.0/24"}))
	g.listen(t, ":80", echo)
	c, err := a.Dial(context.Background(), "one", 80)
	must(t, err)
	defer c.Close()
	must(t, echoes(c))
	must(t, g.do(func() error {
		nl, err := newRoutes()
		if err != nil {
			return err
		}
		defer nl.Close()
		return bringUp(nl, "eth0", netip.MustParsePrefix("192.168.10.2/24"))
	}))
	must(t, echoes(c))
	g.listen(t, "192.168.10.2:81", echo)
	second, err := a.Dial(context.Background(), "one", 81)
	must(t, err)
	defer second.Close()
	must(t, echoes(second))
	if _, err := a.Dial(context.Background(), "one", 82); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial where nobody listens: %v", err)
	}
}

func TestTwoNodesShareAMachine(t *testing.T) {
	newWorld(t)
	a := start(t, testConfig(t, "a"))
	b := start(t, testConfig(t, "b"))
	if a.Prefix().Overlaps(b.Prefix()) {
		t.Errorf("both nodes have %s", a.Prefix())
	}
	of := newGuest(t, claimFor(t, a, "one", cube.NetworkSpec{}))
	claimFor(t, b, "one", cube.NetworkSpec{}).Close()
	hostEnd, insideEnd := endsOf(t, b, "one")
	of.cannotReach(t, hostEnd.String()+":8080", insideEnd.String()+":8080")
	must(t, b.Adopt(context.Background(), nil))
	for _, agent := range []*Agent{a, b} {
		if found := agent.Check(context.Background(), []string{"one"}); len(found) > 0 {
			t.Errorf("node %s: %v", agent.cfg.Node, found)
		}
	}
	must(t, b.Release(context.Background(), "one"))
	must(t, b.Close())
	_, err := of.get(siteAddr)
	must(t, err)
}

// A guest that answers late must not lose what was sent to it meanwhile.
func TestPacketsWaitForTheVMM(t *testing.T) {
	newWorld(t)
	a := start(t, testConfig(t, "t"))
	tap := claimFor(t, a, "one", cube.NetworkSpec{})
	type result struct {
		c   net.Conn
		err error
	}
	dialled := make(chan result, 1)
	go func() {
		c, err := a.Dial(context.Background(), "one", 80)
		dialled <- result{c, err}
	}()
	testenv.Eventually(t, patience, func() error { return readable(tap) })
	g := newGuest(t, tap)
	g.listen(t, ":80", echo)
	got := <-dialled
	if got.err != nil && !errors.Is(got.err, syscall.ECONNREFUSED) {
		t.Fatal(got.err)
	}
	if got.err == nil {
		must(t, echoes(got.c))
		got.c.Close()
	}
}

func slotOf(t testing.TB, a *Agent, owner string) string {
	t.Helper()
	c, err := a.lookUp(owner)
	must(t, err)
	return c.record.Slot
}

// endsOf returns the addresses of an owner's links to the host.
func endsOf(t testing.TB, a *Agent, owner string) (host, inside netip.Addr) {
	t.Helper()
	var index int
	_, err := fmt.Sscanf(slotOf(t, a, owner), a.cfg.linkPrefix()+"%d", &index)
	must(t, err)
	h, i := pair(a.Prefix(), index)
	return h.Addr(), i.Addr()
}
