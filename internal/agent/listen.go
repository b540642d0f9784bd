package agent

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"

	"github.com/cubesandbox/cubelet/internal/agent/wire"
)

// Serve serves the API on l, which must be a TCP listener, until ctx ends. It speaks
// HTTP and the host's own protocol; the first byte of a connection tells which.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	web := &webListener{conns: make(chan net.Conn), done: ctx.Done(), addr: l.Addr()}
	srv := &http.Server{
		Handler:        s.Handler(),
		MaxHeaderBytes: 64 << 10,
		ErrorLog:       slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	var conns sync.WaitGroup
	conns.Go(func() { _ = srv.Serve(web) })
	stop := context.AfterFunc(ctx, func() {
		_ = l.Close()
		_ = srv.Close()
	})
	defer stop()
	err := s.accept(ctx, l, web, &conns)
	cancel()
	_ = srv.Close()
	conns.Wait()
	return err
}

// accept takes connections until l fails or ctx ends.
func (s *Server) accept(ctx context.Context, l net.Listener, web *webListener, conns *sync.WaitGroup) error {
	for {
		conn, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			if ne := net.Error(nil); errors.As(err, &ne) && ne.Temporary() { //nolint:staticcheck // the only way to know that accept may work again
				continue
			}
			return err
		}
		tcp, ok := conn.(*net.TCPConn)
		if !ok {
			_ = conn.Close()
			continue
		}
		conns.Go(func() { s.greet(ctx, tcp, web) })
	}
}

// greet reads the first byte of a connection and passes it to who speaks its protocol.
func (s *Server) greet(ctx context.Context, conn *net.TCPConn, web *webListener) {
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	var first [1]byte
	if _, err := conn.Read(first[:]); err != nil {
		stop()
		_ = conn.Close()
		return
	}
	if first[0] == wire.Magic {
		defer stop()
		defer func() { _ = conn.Close() }()
		s.hostCall(conn)
		return
	}
	if !stop() {
		return
	}
	select {
	case web.conns <- &webConn{TCPConn: conn, first: first[0], unread: true}:
	case <-web.done:
		_ = conn.Close()
	}
}

// webListener hands connections to the HTTP server.
type webListener struct {
	conns chan net.Conn
	done  <-chan struct{}
	addr  net.Addr
}

// Accept implements net.Listener.
func (l *webListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener; the end of Serve's context closes it.
func (l *webListener) Close() error { return nil }

// Addr implements net.Listener.
func (l *webListener) Addr() net.Addr { return l.addr }

// webConn is a connection whose first byte has been read. It keeps what net.TCPConn
// does beyond net.Conn: files are sent without a copy.
type webConn struct {
	*net.TCPConn
	first  byte
	unread bool
}

// Read implements net.Conn.
func (c *webConn) Read(b []byte) (int, error) {
	if c.unread && len(b) > 0 {
		c.unread = false
		b[0] = c.first
		return 1, nil
	}
	return c.TCPConn.Read(b)
}
