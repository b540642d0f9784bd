package agent

import (
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Times of a process's end.
const (
	// outputGrace is how long output is still read after the process has exited while
	// something it started holds its output open.
	outputGrace = 100 * time.Millisecond
	// keepEnded is how long an ended process can still be connected to.
	keepEnded = 30 * time.Second
)

// exit tells how a process ended.
type exit struct {
	status syscall.WaitStatus
	reason string // why it was killed, when the agent did it
	at     time.Time
}

// process is a program that the agent started.
type process struct {
	pid    int
	spec   startSpec
	hub    hub
	agent  *Server
	cgroup *cgroup

	writeMu sync.Mutex // one write at a time; taken before inputMu
	inputMu sync.Mutex
	stdin   *os.File // nil when not connected or closed
	tty     *os.File // the master side, nil without a terminal

	outputs []*os.File   // what pumps read from
	pending atomic.Int32 // pumps that still read, plus one until the exit status is known
	exited  atomic.Bool
	status  syscall.WaitStatus // written before exited is set
	reason  atomic.Pointer[string]
	timer   *time.Timer // the deadline, nil when there is none
}

// pump passes one output to the hub until it ends, or, when the process has exited and
// something else holds the output open, until what is there has been read.
func (p *process) pump(s stream, f *os.File) {
	buf := make([]byte, minRead)
	for {
		n, err := f.Read(buf)
		if n > 0 {
			p.publish(s, buf[:n])
		}
		if n == len(buf) && n < maxRead {
			buf = make([]byte, 2*n)
		}
		if err == nil {
			continue
		}
		held := errors.Is(err, os.ErrDeadlineExceeded) && p.drain(s, f, buf)
		p.done()
		if s == streamPTY {
			return // the last to finish closes the terminal
		}
		if held {
			discard(f, buf)
		}
		f.Close()
		return
	}
}

// Sizes of a pump's buffer: it grows while reads fill it.
const (
	minRead = 4 << 10
	maxRead = 64 << 10
)

func (p *process) publish(s stream, b []byte) {
	p.hub.publish(chunk{s, append([]byte(nil), b...)})
}

// drain publishes what f holds at this moment without waiting for more. It reports
// whether somebody still has the other end open.
func (p *process) drain(s stream, f *os.File, buf []byte) (held bool) {
	raw, err := f.SyscallConn()
	if err != nil || f.SetReadDeadline(time.Time{}) != nil {
		return false
	}
	budget := 0
	_ = raw.Control(func(fd uintptr) { budget, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	for budget > 0 {
		var n int
		var readErr error
		err := raw.Read(func(fd uintptr) bool {
			n, readErr = syscall.Read(int(fd), buf)
			return true
		})
		switch {
		case err != nil:
			return false
		case readErr != nil:
			return errors.Is(readErr, syscall.EAGAIN)
		case n <= 0:
			return false
		}
		p.publish(s, buf[:n])
		budget -= n
	}
	return true
}

// discard reads f to its end, so that a program that outlives the process it was
// started by is not killed by SIGPIPE when it writes.
func discard(f *os.File, buf []byte) {
	for {
		if _, err := f.Read(buf); err != nil {
			return
		}
	}
}

// onExit is called once by the reaper.
func (p *process) onExit(ws syscall.WaitStatus) {
	p.status = ws
	p.exited.Store(true)
	if p.timer != nil {
		p.timer.Stop()
	}
	if p.pending.Load() > 1 {
		limit := time.Now().Add(outputGrace)
		for _, f := range p.outputs {
			_ = f.SetReadDeadline(limit)
		}
	}
	p.done()
}

// done counts a pump or the exit as finished; the last one ends the process.
func (p *process) done() {
	if p.pending.Add(-1) > 0 {
		return
	}
	e := &exit{status: p.status, at: time.Now()}
	if r := p.reason.Load(); r != nil {
		e.reason = *r
	}
	p.hub.close(e)
	p.inputMu.Lock()
	if p.stdin != nil {
		p.stdin.Close()
		p.stdin = nil
	}
	if p.tty != nil {
		p.tty.Close()
	}
	p.inputMu.Unlock()
	p.agent.cgroups.release(p.cgroup)
	p.agent.cgroups.prepare()
}

// kill kills the process and everything it started. The reason, when not empty, is told
// to whoever waits for the end.
func (p *process) kill(reason string) error {
	if reason != "" {
		p.reason.CompareAndSwap(nil, &reason)
	}
	if p.exited.Load() {
		return syscall.ESRCH
	}
	if p.cgroup.kill() == nil {
		return nil
	}
	victims := descendants(p.pid)
	err := p.agent.reaper.signal(-p.pid, syscall.SIGKILL)
	for _, v := range victims {
		_ = syscall.Kill(v, syscall.SIGKILL)
	}
	return err
}

// signal sends a signal to the process group; SIGKILL also reaches what left the group.
func (p *process) signal(sig syscall.Signal) error {
	if sig == syscall.SIGKILL {
		return p.kill("")
	}
	return p.agent.reaper.signal(-p.pid, sig)
}

var (
	errNoStdin = errors.New("stdin is not connected or was closed")
	errNoPTY   = errors.New("the process has no terminal")
	errIsPTY   = errors.New("the stdin of a terminal cannot be closed; send it an end-of-file character")
)

// write sends b to the process's input and returns when the process took it or ctx ended.
func (p *process) write(ctx context.Context, b []byte, pty bool) error {
	p.writeMu.Lock()
	defer p.writeMu.Unlock()
	p.inputMu.Lock()
	f := p.stdin
	if pty {
		f = p.tty
	}
	p.inputMu.Unlock()
	switch {
	case f == nil && pty:
		return errNoPTY
	case f == nil:
		return errNoStdin
	}
	if err := f.SetWriteDeadline(time.Time{}); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = f.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := f.Write(b); err != nil {
		return errors.Join(ctx.Err(), err)
	}
	return nil
}

func (p *process) closeStdin() error {
	p.inputMu.Lock()
	defer p.inputMu.Unlock()
	if p.tty != nil {
		return errIsPTY
	}
	if p.stdin == nil {
		return nil
	}
	err := p.stdin.Close()
	p.stdin = nil
	return err
}

func (p *process) resize(cols, rows uint32) error {
	if p.tty == nil {
		return errNoPTY
	}
	raw, err := p.tty.SyscallConn()
	if err != nil {
		return err
	}
	var ioctlErr error
	err = raw.Control(func(fd uintptr) { ioctlErr = setSize(int(fd), cols, rows) })
	return errors.Join(err, ioctlErr)
}

func setSize(fd int, cols, rows uint32) error {
	ws := unix.Winsize{Col: uint16(min(cols, 1<<16-1)), Row: uint16(min(rows, 1<<16-1))}
	return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &ws)
}
