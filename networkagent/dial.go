package networkagent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
)

// grace is how long Dial waits for the guest's other address after one refused.
const grace = 300 * time.Millisecond

// conn is a connection to a guest that ends with its slot.
type conn struct {
	*net.TCPConn
	claim *claim
}

// Close closes the connection.
func (c *conn) Close() error {
	c.claim.mu.Lock()
	delete(c.claim.conns, c)
	c.claim.mu.Unlock()
	return c.TCPConn.Close()
}

// add ties a connection to the claim. CodeNotFound when the claim is released.
func (c *claim) add(tcp *net.TCPConn) (net.Conn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.gone {
		return nil, errors.Join(cube.Errorf(cube.CodeNotFound, "the network slot was released"), tcp.Close())
	}
	out := &conn{TCPConn: tcp, claim: c}
	c.conns[out] = struct{}{}
	return out, nil
}

// hangUp closes all connections of the claim for good.
func (c *claim) hangUp() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.gone = true
	for open := range c.conns {
		// Its user sees the error of the next read or write, not that of this Close.
		_ = open.TCPConn.Close()
	}
	clear(c.conns)
}

// Dial opens a TCP connection to a port of the owner's guest from inside its namespace.
// A guest with a subnet of its own is tried at both of its addresses. Codes: NotFound
// for an unknown owner, Invalid for an impossible port, Unavailable when the guest
// refuses or cannot be reached, those of ctx.
func (a *Agent) Dial(ctx context.Context, owner string, port int) (net.Conn, error) {
	if port < 1 || port > 65535 {
		return nil, cube.InvalidField("port", "%d is not between 1 and 65535", port)
	}
	c, err := a.lookUp(owner)
	if err != nil {
		return nil, err
	}
	files, err := a.sockets(c)
	if err != nil {
		return nil, fmt.Errorf("dial port %d of %s: %w", port, owner, err)
	}
	tcp, err := connectFirst(ctx, files, c.record.Guests, uint16(port))
	if err != nil {
		return nil, fmt.Errorf("dial port %d of %s: %w", port, owner, err)
	}
	return c.add(tcp)
}

// sockets makes a TCP socket for each address of the guest. A socket stays in the
// namespace that it was made in, whoever uses it.
func (a *Agent) sockets(c *claim) ([]int, error) {
	if c.record.Slot == "" || len(c.record.Guests) == 0 {
		return nil, cube.Errorf(cube.CodeNotFound, "its network slot is lost")
	}
	var fds []int
	err := inside(a.shop.home, a.cfg.slotPath(c.record.Slot), func() error {
		for range c.record.Guests {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return fmt.Errorf("make socket: %w", err)
			}
			fds = append(fds, fd)
		}
		return nil
	})
	if err != nil {
		for _, fd := range fds {
			_ = unix.Close(fd) // never connected
		}
		return nil, err
	}
	return fds, nil
}

// connectFirst connects socket i to guest i and returns the first connection that
// stands. It takes over the sockets.
func connectFirst(ctx context.Context, fds []int, guests []netip.Addr, port uint16) (*net.TCPConn, error) {
	if len(fds) == 1 {
		return connect(ctx, fds[0], netip.AddrPortFrom(guests[0], port))
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var (
		first sync.Once
		won   *net.TCPConn
		errs  = make([]error, len(fds))
		wg    sync.WaitGroup
	)
	for i, fd := range fds {
		wg.Go(func() {
			tcp, err := connect(ctx, fd, netip.AddrPortFrom(guests[i], port))
			if err != nil {
				errs[i] = err
				// The guest is there: its other address answers soon or never.
				stop := time.AfterFunc(grace, cancel)
				context.AfterFunc(ctx, func() { stop.Stop() })
				return
			}
			first.Do(func() { won = tcp })
			if won != tcp {
				errs[i] = tcp.Close()
			}
			cancel()
		})
	}
	wg.Wait()
	if won != nil {
		return won, nil
	}
	return nil, mostTelling(errs)
}

// mostTelling prefers the error of a guest that answered to that of a wait cut short.
func mostTelling(errs []error) error {
	for _, err := range errs {
		if err != nil && !errors.Is(err, context.Canceled) {
			return err
		}
	}
	return errs[0]
}

// connect takes over the socket and returns the established connection.
func connect(ctx context.Context, fd int, to netip.AddrPort) (*net.TCPConn, error) {
	err := unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())})
	// Only now: the poller would report an unconnected socket as hung up.
	f := os.NewFile(uintptr(fd), to.String())
	defer f.Close()
	if errors.Is(err, unix.EINPROGRESS) {
		err = established(ctx, f)
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("connect to %s: %w", to, context.Cause(ctx))
	}
	if err != nil {
		return nil, cube.Errorf(cube.CodeUnavailable, "connect to %s: %w", to, err)
	}
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", to, err)
	}
	tcp := c.(*net.TCPConn)
	if err := tcp.SetNoDelay(true); err != nil {
		return nil, errors.Join(fmt.Errorf("connect to %s: %w", to, err), tcp.Close())
	}
	return tcp, nil
}

// established waits for a connection under way.
func established(ctx context.Context, f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() {
		_ = f.SetWriteDeadline(time.Unix(1, 0)) // fails only when f is closed
	})
	defer stop()
	var result error
	err = raw.Write(func(fd uintptr) bool {
		var done bool
		done, result = connected(int(fd))
		return done
	})
	return errors.Join(err, result)
}

func connected(fd int) (bool, error) {
	code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return true, err
	}
	if code != 0 {
		return true, unix.Errno(code)
	}
	_, err = unix.Getpeername(fd)
	if errors.Is(err, unix.ENOTCONN) {
		return false, nil // woken for nothing
	}
	return true, err
}
