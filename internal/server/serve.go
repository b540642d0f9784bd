package server

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"

	cube "github.com/cubesandbox/cubelet"
	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

// Limits of connections. Bodies have none: exec, logs and files are streams.
const (
	headerTimeout  = 10 * time.Second
	idleTimeout    = 2 * time.Minute
	pingAfter      = 30 * time.Second // of silence on an HTTP/2 connection
	pingTimeout    = 15 * time.Second
	maxHeaderBytes = 64 << 10
	// One stream whose receiver is slow must not use up its connection's window, which
	// all calls of a client share; the latter cannot be larger.
	streamWindow = 512 << 10
	connWindow   = 4<<20 - 1
)

// grace is how long calls may go on once a server is told to stop.
type grace struct {
	streams time.Duration // exec, logs, template builds, file transfers
	calls   time.Duration // everything else
	abort   time.Duration // for a canceled call to return
}

// Serve serves the handler on all listeners, which must come from ListenUnix and
// ListenTLS and are closed at the end. When ctx ends it accepts no more, gives streams
// 3 s and other calls 20 s, cancels what is left, and returns nil. It returns an error
// when a listener fails.
func Serve(ctx context.Context, listeners []net.Listener, handler http.Handler, log *slog.Logger) error {
	s := &serving{
		handler: handler,
		log:     log,
		grace:   grace{streams: 3 * time.Second, calls: 20 * time.Second, abort: 5 * time.Second},
		streams: streamPaths(),
	}
	return s.run(ctx, listeners)
}

type serving struct {
	handler http.Handler
	log     *slog.Logger
	grace   grace
	streams map[string]bool
}

func (s *serving) run(ctx context.Context, listeners []net.Listener) error {
	if err := s.prepare(listeners); err != nil {
		return errors.Join(err, closeAll(listeners))
	}
	calls, cancelCalls := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancelCalls(nil)
	streams, cancelStreams := context.WithCancelCause(calls)
	defer cancelStreams(nil)

	srv := s.server(calls, streams)
	failed := make(chan error, len(listeners))
	for _, l := range listeners {
		go func() { failed <- srv.Serve(l) }()
	}
	running := len(listeners)
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
		running--
	}
	stopping := cube.Errorf(cube.CodeUnavailable, "the node is shutting down")
	stopStreams := time.AfterFunc(s.grace.streams, func() { cancelStreams(stopping) })
	defer stopStreams.Stop()
	stopCalls := time.AfterFunc(s.grace.calls, func() { cancelCalls(stopping) })
	defer stopCalls.Stop()
	err = errors.Join(err, s.shutdown(ctx, srv))
	for range running {
		if serveErr := <-failed; !errors.Is(serveErr, http.ErrServerClosed) {
			err = errors.Join(err, serveErr)
		}
	}
	return err
}

// shutdown waits for the calls under way, the last of which are canceled at the end of
// their grace.
func (s *serving) shutdown(ctx context.Context, srv *http.Server) error {
	bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.grace.calls+s.grace.abort)
	defer cancel()
	if srv.Shutdown(bound) == nil {
		return nil
	}
	s.log.Warn("calls did not return when they were canceled")
	return srv.Close()
}

// prepare refuses listeners that anybody could connect to.
func (s *serving) prepare(listeners []net.Listener) error {
	for _, l := range listeners {
		switch l := l.(type) {
		case *tlsListener:
		case *unixListener:
			l.refused = func(err error) { s.log.Warn("connection refused", "error", err) }
		default:
			return cube.Errorf(cube.CodeInternal, "listener on %s checks no peers", l.Addr())
		}
	}
	return nil
}

func closeAll(listeners []net.Listener) error {
	var errs []error
	for _, l := range listeners {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}

func (s *serving) server(calls, streams context.Context) *http.Server {
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if s.isStream(r.URL.Path) {
				ctx, cancel := context.WithCancelCause(r.Context())
				defer cancel(nil)
				defer context.AfterFunc(streams, func() { cancel(context.Cause(streams)) })()
				r = r.WithContext(ctx)
			}
			s.handler.ServeHTTP(w, r)
		}),
		BaseContext: func(net.Listener) context.Context { return calls },
		Protocols:   &protocols,
		HTTP2: &http.HTTP2Config{
			SendPingTimeout:               pingAfter,
			PingTimeout:                   pingTimeout,
			MaxReceiveBufferPerStream:     streamWindow,
			MaxReceiveBufferPerConnection: connWindow,
		},
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
}

func (s *serving) isStream(path string) bool {
	const guest = "/guest/"
	return s.streams[path] || len(path) > len(guest) && path[:len(guest)] == guest
}

// streamPaths lists the streaming procedures of the API and of the health service.
func streamPaths() map[string]bool {
	paths := map[string]bool{"/grpc.health.v1.Health/Watch": true}
	for _, file := range []protoreflect.FileDescriptor{
		cubev1.File_cube_v1_sandbox_proto, cubev1.File_cube_v1_template_proto, cubev1.File_cube_v1_node_proto,
	} {
		for i := range file.Services().Len() {
			service := file.Services().Get(i)
			for j := range service.Methods().Len() {
				if m := service.Methods().Get(j); m.IsStreamingClient() || m.IsStreamingServer() {
					paths["/"+string(service.FullName())+"/"+string(m.Name())] = true
				}
			}
		}
	}
	return paths
}
