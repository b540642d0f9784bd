package e2e

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"

	"github.com/vishvananda/netlink"
)

// internet is a namespace beside the node's, with a web server on a public-looking
// address, that stands for everything outside.
type internet struct {
	address     string // of the web server
	hostAddress string // of the node's host, with a web server that guests must not reach
}

// newInternet joins the node's namespace to an internet, for the rest of the test.
func (n *node) newInternet(t *testing.T) internet {
	t.Helper()
	const (
		outside = "203.0.113.1/24"
		host    = "203.0.113.2/24"
	)
	far := node{t: t, ns: newNamespace(t)}
	err := n.inNamespace(func() error {
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "uplink"}, PeerName: "inet", PeerNamespace: netlink.NsFd(far.ns)}
		if err := netlink.LinkAdd(veth); err != nil {
			return fmt.Errorf("veth: %w", err)
		}
		if err := configure("uplink", host); err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP("203.0.113.1")})
	})
	if err == nil {
		err = far.inNamespace(func() error { return configure("inet", outside) })
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		err := n.inNamespace(func() error {
			link, err := netlink.LinkByName("uplink")
			if err != nil {
				return err
			}
			return netlink.LinkDel(link)
		})
		if err != nil {
			t.Errorf("take the internet away: %v", err)
		}
	})
	far.serve(t, "203.0.113.1:80", "the internet")
	n.serve(t, "203.0.113.2:80", "the host")
	return internet{address: "203.0.113.1", hostAddress: "203.0.113.2"}
}

// serve answers every HTTP request on an address of the namespace with a text.
func (n *node) serve(t *testing.T, addr, text string) {
	t.Helper()
	err := n.inNamespace(func() error {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			return err
		}
		srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, text) // the client reports what it got
		})}
		go func() { _ = srv.Serve(l) }() // ends with the close below
		t.Cleanup(func() { srv.Close() })
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// configure brings a link of the current namespace up with an address.
func configure(link, cidr string) error {
	l, err := netlink.LinkByName(link)
	if err != nil {
		return fmt.Errorf("link %s: %w", link, err)
	}
	addr, err := netlink.ParseAddr(cidr)
	if err != nil {
		return err
	}
	if err := netlink.AddrAdd(l, addr); err != nil {
		return fmt.Errorf("address of %s: %w", link, err)
	}
	return netlink.LinkSetUp(l)
}
