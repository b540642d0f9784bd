package launch

import (
	"errors"
	"fmt"
	"math"
	"os"

	"golang.org/x/sys/unix"
)

// Serve listens on socketPath, waits for one valid launch message from a process of
// user 0 and becomes the program that it orders: it returns only with an error. A
// bad message is answered and the next connection awaited; a launch that went wrong
// later has replaced descriptors already, so it ends Serve. The socket is removed
// before the execve. All calls are plain system calls on blocking descriptors: the
// runtime's poller would own a descriptor among those that are replaced.
func Serve(socketPath string) error {
	listener, err := listen(socketPath)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", socketPath, err)
	}
	for {
		conn, err := accept(listener)
		if err != nil {
			return fmt.Errorf("accept: %w", err)
		}
		m, files, err := receive(conn)
		if err != nil {
			reply(conn, err.Error())
			closeAll(files)
			_ = unix.Close(conn)
			continue
		}
		_ = os.Remove(socketPath)
		err = become(conn, m, files)
		reply(conn, err.Error())
		return err
	}
}

// listen keeps the listener above the descriptors that a launch may replace. The
// socket gets its name only when it listens, so whoever sees it can connect.
func listen(path string) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path + ".new"}); err != nil {
		return -1, err
	}
	if err := unix.Listen(fd, 8); err != nil {
		return -1, err
	}
	up, err := raise(fd)
	if err != nil {
		return -1, err
	}
	return up, os.Rename(path+".new", path)
}

func accept(listener int) (int, error) {
	for {
		fd, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
		switch {
		case err == nil:
			return raise(fd)
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.ECONNABORTED):
		default:
			return -1, err
		}
	}
}

// receive reads the one message of a connection. The caller owns the descriptors,
// those that come with an error too.
func receive(conn int) (Message, []int, error) {
	cred, err := unix.GetsockoptUcred(conn, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return Message{}, nil, fmt.Errorf("peer credentials: %w", err)
	}
	if cred.Uid != 0 {
		return Message{}, nil, fmt.Errorf("user %d may not command the launcher", cred.Uid)
	}
	data := make([]byte, MaxMessage)
	oob := make([]byte, unix.CmsgSpace(4*MaxFiles))
	n, oobn, flags, err := recvmsg(conn, data, oob)
	if err != nil {
		return Message{}, nil, fmt.Errorf("receive message: %w", err)
	}
	files, err := rights(oob[:oobn])
	if err != nil {
		return Message{}, files, err
	}
	if flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		return Message{}, files, errors.New("message or its list of files is too long")
	}
	m, err := Decode(data[:n], len(files))
	return m, files, err
}

func recvmsg(conn int, data, oob []byte) (n, oobn, flags int, err error) {
	for {
		n, oobn, flags, _, err = unix.Recvmsg(conn, data, oob, unix.MSG_CMSG_CLOEXEC)
		if !errors.Is(err, unix.EINTR) {
			return n, oobn, flags, err
		}
	}
}

func rights(oob []byte) ([]int, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("parse control message: %w", err)
	}
	var files []int
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			return files, fmt.Errorf("parse file descriptors: %w", err)
		}
		files = append(files, fds...)
	}
	return files, nil
}

// become puts the files in their places and replaces the process image.
func become(conn int, m Message, files []int) error {
	if err := noCoreMemory(); err != nil {
		return err
	}
	// First all files above every destination, so that none is overwritten before
	// it is copied, then all down.
	for i, fd := range files {
		up, err := raise(fd)
		if err != nil {
			return err
		}
		files[i] = up
	}
	// Whatever else is open, inherited perhaps, is not part of the order.
	if err := unix.CloseRange(3, math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return fmt.Errorf("close other descriptors: %w", err)
	}
	for i, fd := range files {
		if err := unix.Dup3(fd, m.FDs[i], 0); err != nil {
			return fmt.Errorf("place descriptor %d: %w", m.FDs[i], err)
		}
	}
	reply(conn, ackExec)
	return fmt.Errorf("execute %s: %w", m.Args[0], unix.Exec(m.Args[0], m.Args, m.Env))
}

// noCoreMemory keeps guest memory out of core dumps. RLIMIT_CORE 0 alone does not:
// the kernel ignores it when core_pattern is a pipe. The filter survives execve.
func noCoreMemory() error {
	fd, err := unix.Open("/proc/self/coredump_filter", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open coredump_filter: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	if _, err := unix.Write(fd, []byte("0")); err != nil {
		return fmt.Errorf("write coredump_filter: %w", err)
	}
	return nil
}

// raise moves a descriptor to a number that no launch replaces and sets CLOEXEC.
func raise(fd int) (int, error) {
	up, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, MaxFiles)
	if err != nil {
		return -1, fmt.Errorf("move descriptor %d: %w", fd, err)
	}
	return up, unix.Close(fd)
}

func reply(conn int, text string) {
	_ = unix.Sendto(conn, []byte(text), unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT, nil)
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}
