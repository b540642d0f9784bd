package server

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
)

// probeTimeout bounds the question whether somebody answers on an old socket.
const probeTimeout = 2 * time.Second

// ListenUnix listens on a unix socket of mode 0600 that accepts only root and the
// daemon's own user. A socket at path on which nobody answers is replaced; it is
// AlreadyExists when somebody does, or when path is no socket. The caller closes the
// listener, which removes the socket.
func ListenUnix(path string) (net.Listener, error) {
	if err := removeStale(path); err != nil {
		return nil, err
	}
	// The socket is private before it can be connected to: it gets its name only then.
	temp := fmt.Sprintf("%s.%d", path, os.Getpid())
	if err := removeSocket(temp); err != nil {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: temp, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	l.SetUnlinkOnClose(false)
	if err := errors.Join(os.Chmod(temp, 0o600), os.Rename(temp, path)); err != nil {
		return nil, errors.Join(fmt.Errorf("listen on %s: %w", path, err), l.Close(), removeSocket(temp))
	}
	return &unixListener{UnixListener: l, path: path, allowed: rootOrSelf}, nil
}

func removeStale(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("listen on %s: %w", path, err)
	case info.Mode().Type() != fs.ModeSocket:
		return cube.Errorf(cube.CodeAlreadyExists, "listen on %s: it is no socket", path)
	}
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	switch {
	case err == nil:
		_ = conn.Close() // it was only a question
		return cube.Errorf(cube.CodeAlreadyExists, "listen on %s: another process answers there", path).
			WithHint("Stop the other cubelet, or give this one another root directory.")
	case errors.Is(err, unix.ECONNREFUSED):
		return removeSocket(path)
	}
	return fmt.Errorf("listen on %s: probe the old socket: %w", path, err)
}

func removeSocket(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove old socket: %w", err)
	}
	return nil
}

// unixListener lets in only peers whose credentials are allowed.
type unixListener struct {
	*net.UnixListener
	path    string
	allowed func(*unix.Ucred) bool
	refused func(error) // told of each peer that is turned away; set before Accept
	closed  atomic.Bool
}

// Addr implements net.Listener.
func (l *unixListener) Addr() net.Addr { return &net.UnixAddr{Name: l.path, Net: "unix"} }

// Accept implements net.Listener.
func (l *unixListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.AcceptUnix()
		if err != nil {
			return nil, err
		}
		err = l.examine(conn)
		if err == nil {
			return conn, nil
		}
		_ = conn.Close() // it is not served
		if l.refused != nil {
			l.refused(err)
		}
	}
}

func (l *unixListener) examine(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return fmt.Errorf("peer credentials: %w", err)
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return fmt.Errorf("peer credentials: %w", err)
	}
	if credErr != nil {
		return fmt.Errorf("peer credentials: %w", credErr)
	}
	if !l.allowed(cred) {
		return cube.Errorf(cube.CodePermissionDenied, "process %d of uid %d may not connect", cred.Pid, cred.Uid)
	}
	return nil
}

// Close implements net.Listener. It removes the socket, once: a new listener may have
// taken the path since.
func (l *unixListener) Close() error {
	if l.closed.Swap(true) {
		return nil
	}
	return errors.Join(removeSocket(l.path), l.UnixListener.Close())
}

func rootOrSelf(c *unix.Ucred) bool { return c.Uid == 0 || int(c.Uid) == os.Geteuid() }
