package cubetest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
)

// Exec implements cube.Sandboxes with a process of the test. Without arguments it runs
// echo "entrypoint". The paths of chmod and ln are those of the guest.
func (s sandboxes) Exec(ctx context.Context, ref string, spec cube.ExecSpec) (cube.ExecSession, error) {
	sb, err := s.get(ctx, "exec", ref)
	if err != nil {
		return nil, err
	}
	args := spec.Args
	if len(args) == 0 {
		args = []string{"echo", "entrypoint"}
	}
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Dir = s.n.GuestDir(sb.ID)
	if args[0] == "chmod" || args[0] == "ln" {
		mapPaths(cmd.Args[1:], cmd.Dir)
	}
	if spec.Cwd != "" {
		cmd.Dir += "/" + spec.Cwd
	}
	cmd.Env = append(os.Environ(), "USER="+spec.User)
	for k, v := range sb.spec.Env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	for k, v := range spec.Env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	x := &session{node: s.n, cmd: cmd, events: make(chan cube.ExecEvent), gone: make(chan struct{}), closed: make(chan struct{})}
	if err := x.start(spec); err != nil {
		return nil, cube.InvalidField("start.args", "%w", err)
	}
	return x, nil
}

func mapPaths(args []string, root string) {
	for i, a := range args {
		if strings.HasPrefix(a, "/") {
			args[i] = root + a
		}
	}
}

// session implements cube.ExecSession.
type session struct {
	node   *Node
	cmd    *exec.Cmd
	stdin  io.WriteCloser // nil without standard input
	tty    *os.File       // nil without a terminal
	events chan cube.ExecEvent
	gone   chan struct{} // closed when the program is reaped
	closed chan struct{}
	once   sync.Once
	done   bool // Recv returned the exit event

	ttyMu   sync.Mutex // a terminal must not be resized while it is closed
	ttyGone bool
}

func (x *session) start(spec cube.ExecSpec) error {
	var outputs []output
	var err error
	if spec.TTY != nil {
		size := &pty.Winsize{Cols: uint16(spec.TTY.Cols), Rows: uint16(spec.TTY.Rows)}
		if x.tty, err = pty.StartWithSize(x.cmd, size); err != nil {
			return err
		}
		x.stdin = x.tty
		outputs = []output{{cube.StreamTTY, x.tty}}
	} else if outputs, err = x.startPipes(spec.Stdin); err != nil {
		return err
	}
	x.node.mu.Lock()
	x.node.running[x.cmd] = true
	x.node.mu.Unlock()
	go x.run(outputs, spec.Timeout)
	return nil
}

type output struct {
	stream cube.ExecStream
	r      io.ReadCloser
}

func (x *session) startPipes(withStdin bool) ([]output, error) {
	stdout, err := x.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	stderr, err := x.cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	if withStdin {
		if x.stdin, err = x.cmd.StdinPipe(); err != nil {
			return nil, err
		}
	}
	return []output{{cube.StreamStdout, stdout}, {cube.StreamStderr, stderr}}, x.cmd.Start()
}

// run delivers output, then the exit event. Nobody listening is no reason to stop.
func (x *session) run(outputs []output, timeout time.Duration) {
	if timeout > 0 {
		defer time.AfterFunc(timeout, func() { _ = x.cmd.Process.Kill() }).Stop()
	}
	x.deliver(cube.ExecEvent{PID: uint32(x.cmd.Process.Pid)})
	var readers sync.WaitGroup
	for _, o := range outputs {
		readers.Go(func() { x.copy(o) })
	}
	readers.Wait()
	err := x.cmd.Wait()
	x.node.mu.Lock()
	delete(x.node.running, x.cmd)
	x.node.mu.Unlock()
	close(x.gone)
	x.closeTTY()
	x.deliver(cube.ExecEvent{Exit: exitOf(err)})
}

func (x *session) closeTTY() {
	if x.tty == nil {
		return
	}
	x.ttyMu.Lock()
	defer x.ttyMu.Unlock()
	x.ttyGone = true
	_ = x.tty.Close() // the program is gone
}

func (x *session) copy(o output) {
	for {
		buf := make([]byte, 4096)
		n, err := o.r.Read(buf)
		if n > 0 {
			x.deliver(cube.ExecEvent{Stream: o.stream, Data: buf[:n]})
		}
		if err != nil {
			return // io.EOF, or EIO of a terminal
		}
	}
}

func (x *session) deliver(ev cube.ExecEvent) {
	select {
	case x.events <- ev:
	case <-x.closed:
	}
}

func exitOf(err error) *cube.ExecExit {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return &cube.ExecExit{Status: "exit status 0"}
	}
	out := &cube.ExecExit{Code: exit.ExitCode(), Status: exit.Error()}
	if ws, ok := exit.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		out.Code, out.Signal = 128+int(ws.Signal()), unix.SignalName(ws.Signal())
	}
	return out
}

// Recv implements cube.ExecSession.
func (x *session) Recv() (cube.ExecEvent, error) {
	if x.done {
		return cube.ExecEvent{}, io.EOF
	}
	select {
	case ev := <-x.events:
		x.done = ev.Exit != nil
		return ev, nil
	case <-x.closed:
		return cube.ExecEvent{}, fmt.Errorf("receive: %w", os.ErrClosed)
	}
}

// SendStdin implements cube.ExecSession.
func (x *session) SendStdin(b []byte) error {
	if x.stdin == nil {
		return cube.Errorf(cube.CodeFailedPrecondition, "no standard input")
	}
	_, err := x.stdin.Write(b)
	return err
}

// CloseStdin implements cube.ExecSession.
func (x *session) CloseStdin() error {
	if x.stdin == nil || x.tty != nil {
		return nil
	}
	return x.stdin.Close()
}

// Signal implements cube.ExecSession.
func (x *session) Signal(sig int) error {
	if err := x.cmd.Process.Signal(syscall.Signal(sig)); err != nil {
		return cube.Errorf(cube.CodeNotFound, "signal: %w", err)
	}
	return nil
}

// Resize implements cube.ExecSession.
func (x *session) Resize(ws cube.WindowSize) error {
	if x.tty == nil {
		return cube.Errorf(cube.CodeFailedPrecondition, "no terminal")
	}
	x.ttyMu.Lock()
	defer x.ttyMu.Unlock()
	if x.ttyGone {
		return cube.Errorf(cube.CodeNotFound, "the program has ended")
	}
	return pty.Setsize(x.tty, &pty.Winsize{Cols: uint16(ws.Cols), Rows: uint16(ws.Rows)})
}

// Close implements cube.ExecSession. A SendStdin that the program does not read stays
// blocked no longer.
func (x *session) Close() error {
	x.once.Do(func() {
		close(x.closed)
		if x.stdin != nil && x.tty == nil {
			_ = x.stdin.Close()
		}
	})
	return nil
}
