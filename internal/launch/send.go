package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// ackExec is the launcher's packet that says: files in place, execve is next.
const ackExec = "exec"

// Send orders the launcher that listens on socketPath to execve args[0] with exactly
// the environment env and files[i] as descriptor i. It returns nil when the execve
// succeeded, else the launcher's error text. The files stay the caller's. The
// socket's directory may have any length; ctx bounds the whole exchange.
func Send(ctx context.Context, socketPath string, args, env []string, files []*os.File) error {
	m := Message{Args: args, Env: env, FDs: make([]int, len(files))}
	for i := range files {
		m.FDs[i] = i
	}
	fds, err := numbers(files)
	if err != nil {
		return err
	}
	data, err := m.encode()
	if err != nil {
		return err
	}
	conn, err := dial(ctx, socketPath)
	if err != nil {
		return fmt.Errorf("connect to launcher: %w", err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()

	err = exchange(conn, data, fds)
	runtime.KeepAlive(files)
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("launch: %w", ctx.Err())
	}
	return err
}

// numbers does not use File.Fd, which makes a file blocking behind its owner's back.
func numbers(files []*os.File) ([]int, error) {
	fds := make([]int, len(files))
	for i, f := range files {
		raw, err := f.SyscallConn()
		if err == nil {
			err = raw.Control(func(fd uintptr) { fds[i] = int(fd) })
		}
		if err != nil {
			return nil, fmt.Errorf("file %d: %w", i, err)
		}
	}
	return fds, nil
}

func exchange(conn *os.File, data []byte, fds []int) error {
	if err := sendPacket(conn, data, fds); err != nil {
		return fmt.Errorf("send launch message: %w", err)
	}
	acked := false
	buf := make([]byte, 4096)
	for {
		n, err := conn.Read(buf)
		switch {
		case err == nil && string(buf[:n]) == ackExec:
			acked = true
		case err == nil:
			return fmt.Errorf("launcher: %s", buf[:n])
		case errors.Is(err, io.EOF) && acked:
			return nil
		case errors.Is(err, io.EOF), errors.Is(err, unix.ECONNRESET):
			return errors.New("launcher went away before the launch")
		default:
			return fmt.Errorf("read launcher's answer: %w", err)
		}
	}
}

// dial connects through the directory's descriptor, because a socket address holds
// 107 bytes only.
func dial(ctx context.Context, socketPath string) (*os.File, error) {
	dir, err := unix.Open(filepath.Dir(socketPath), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: filepath.Dir(socketPath), Err: err}
	}
	defer func() { _ = unix.Close(dir) }()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	conn := os.NewFile(uintptr(fd), socketPath)
	addr := &unix.SockaddrUnix{Name: "/proc/self/fd/" + strconv.Itoa(dir) + "/" + filepath.Base(socketPath)}
	for {
		err := unix.Connect(fd, addr)
		if err == nil {
			return conn, nil
		}
		// A full backlog: somebody else is being served, which takes microseconds.
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
			conn.Close()
			return nil, &os.PathError{Op: "connect", Path: socketPath, Err: err}
		}
		select {
		case <-ctx.Done():
			conn.Close()
			return nil, ctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
}

func sendPacket(conn *os.File, data []byte, fds []int) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	var sendErr error
	err = raw.Write(func(fd uintptr) bool {
		sendErr = unix.Sendmsg(int(fd), data, rights, nil, unix.MSG_NOSIGNAL)
		return !errors.Is(sendErr, unix.EAGAIN)
	})
	if err != nil {
		return err
	}
	return sendErr
}
