package cli

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	"connectrpc.com/connect"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/api/cube/v1/cubev1connect"
)

// client is a connection to one node.
type client struct {
	sandboxes cubev1connect.SandboxServiceClient
	templates cubev1connect.TemplateServiceClient
	node      cubev1connect.NodeServiceClient

	http  *http.Client
	base  string // for example http://cubelet
	local bool   // the node runs on this machine
}

func (c *client) close() { c.http.CloseIdleConnections() }

// dial prepares a client of the node that the global flags name. It does not connect.
func (a *app) dial() (*client, error) {
	if a.client != nil {
		return a.client, nil
	}
	var protocols http.Protocols
	transport := &http.Transport{Protocols: &protocols, DisableCompression: true}
	c := &client{}
	if path, ok := socketPath(a.address); ok {
		protocols.SetUnencryptedHTTP2(true)
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}
		c.base, c.local = "http://cubelet", true
	} else {
		host, config, err := a.tls()
		if err != nil {
			return nil, err
		}
		protocols.SetHTTP2(true)
		transport.TLSClientConfig = config
		c.base = "https://" + host
	}
	c.http = &http.Client{Transport: &roundTripper{transport: transport, local: c.local}}
	// Neither side gains by compressing on one machine or in one data centre.
	opts := connect.WithAcceptCompression("gzip", nil, nil)
	c.sandboxes = cubev1connect.NewSandboxServiceClient(c.http, c.base, opts)
	c.templates = cubev1connect.NewTemplateServiceClient(c.http, c.base, opts)
	c.node = cubev1connect.NewNodeServiceClient(c.http, c.base, opts)
	a.client = c
	return c, nil
}

// roundTripper marks calls that got no answer.
type roundTripper struct {
	transport *http.Transport
	local     bool
}

// RoundTrip implements http.RoundTripper.
func (t *roundTripper) RoundTrip(r *http.Request) (*http.Response, error) {
	res, err := t.transport.RoundTrip(r)
	if err != nil && r.Context().Err() == nil {
		return nil, &lostError{local: t.local, err: err}
	}
	return res, err
}

// CloseIdleConnections is called by http.Client.
func (t *roundTripper) CloseIdleConnections() { t.transport.CloseIdleConnections() }

// socketPath returns the path of a unix socket's address.
func socketPath(address string) (string, bool) {
	if path, ok := strings.CutPrefix(address, "unix://"); ok {
		return path, true
	}
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		return path, true
	}
	return address, filepath.IsAbs(address)
}

// tls returns the host and the credentials for an address on the network.
func (a *app) tls() (string, *tls.Config, error) {
	host := strings.TrimSuffix(strings.TrimPrefix(a.address, "https://"), "/")
	if _, _, err := net.SplitHostPort(host); err != nil || strings.Contains(host, "/") {
		return "", nil, badFlag("address", "%q is neither unix:///PATH nor HOST:PORT", a.address)
	}
	for _, f := range [...]struct{ flag, v string }{{"tls-cert", a.tlsCert}, {"tls-key", a.tlsKey}, {"tls-ca", a.tlsCA}} {
		if f.v == "" {
			return "", nil, &flagError{f.flag, cube.Errorf(cube.CodeInvalid, "is required with the address %s", host).
				WithHint("A node on the network speaks only mutual TLS: give --tls-cert, --tls-key and --tls-ca.")}
		}
	}
	pair, err := tls.LoadX509KeyPair(a.tlsCert, a.tlsKey)
	if err != nil {
		return "", nil, fmt.Errorf("load client certificate: %w", err)
	}
	pem, err := os.ReadFile(a.tlsCA)
	if err != nil {
		return "", nil, fmt.Errorf("load CA: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return "", nil, badFlag("tls-ca", "%s holds no certificate", a.tlsCA)
	}
	return host, &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, RootCAs: pool}, nil
}
