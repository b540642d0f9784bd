package server

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"

	cube "github.com/cubesandbox/cubelet"
)

// ListenTLS listens on a TCP address for clients that show a certificate of clientCA.
// The arguments cert, key and clientCA are PEM files and all required. TLS 1.3 is the
// only version. The caller closes the listener.
func ListenTLS(addr, cert, key, clientCA string) (net.Listener, error) {
	for _, f := range [...]struct{ field, v string }{{"certificate", cert}, {"key", key}, {"client CA", clientCA}} {
		if f.v == "" {
			return nil, cube.Errorf(cube.CodeInvalid, "listen on %s: no %s", addr, f.field).
				WithHint("TCP is served only with mutual TLS.")
		}
	}
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: load certificate: %w", addr, err)
	}
	pem, err := os.ReadFile(clientCA)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: client CA: %w", addr, err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, cube.Errorf(cube.CodeInvalid, "listen on %s: %s holds no certificate", addr, clientCA)
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", addr, err)
	}
	return &tlsListener{tls.NewListener(l, &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{pair},
		ClientAuth:   tls.RequireAndVerifyClientCert,
		ClientCAs:    pool,
		NextProtos:   []string{"h2", "http/1.1"},
	})}, nil
}

// tlsListener is a type of its own so that Serve can tell it from a plain one.
type tlsListener struct{ net.Listener }
