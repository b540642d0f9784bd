package cli

import (
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"connectrpc.com/connect"
	"golang.org/x/term"

	cube "github.com/cubesandbox/cubelet"
	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

const (
	// stdinAhead is how much standard input may be under way that the program has not
	// taken; the API promises that signals pass as long as it is not more.
	stdinAhead = 256 << 10
	// stdinChunk is how much is sent at once.
	stdinChunk = 32 << 10
	// patience is how many times a user has to interrupt before cubecli gives up on a
	// program that ignores it.
	patience = 3
)

// execContext is the context of an exec: signals do not end it, they are forwarded.
func (a *app) execContext(ctx context.Context) (context.Context, context.CancelFunc) {
	if a.deadline > 0 {
		return context.WithTimeout(ctx, a.deadline)
	}
	return context.WithCancel(ctx)
}

type clientStream = connect.BidiStreamForClient[cubev1.ExecSandboxRequest, cubev1.ExecSandboxResponse]

// execSession joins cubecli's own streams, signals and terminal to a program.
type execSession struct {
	app    *app
	stream *clientStream
	start  *cubev1.ExecStart

	send sync.Mutex // serialises stream.Send

	mu    sync.Mutex
	room  *sync.Cond // taken or over has changed
	sent  uint64     // bytes of standard input
	taken uint64
	over  bool

	abort chan error // the user lost patience
}

func newExecSession(a *app, stream *clientStream, start *cubev1.ExecStart) *execSession {
	x := &execSession{app: a, stream: stream, start: start, abort: make(chan error, 1)}
	x.room = sync.NewCond(&x.mu)
	return x
}

// run returns how the program ended. The terminal is as before when it returns.
func (x *execSession) run() (*cubev1.ExecExited, error) {
	restore, err := x.rawMode()
	if err != nil {
		return nil, err
	}
	defer restore()
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, forwarded()...)
	defer signal.Stop(signals)

	if err := x.request(&cubev1.ExecSandboxRequest{Request: &cubev1.ExecSandboxRequest_Start{Start: x.start}}); err != nil {
		return nil, x.cause(err)
	}
	type result struct {
		exit *cubev1.ExecExited
		err  error
	}
	ended := make(chan result, 1)
	go func() {
		exit, err := x.output()
		ended <- result{exit, err}
	}()
	done := make(chan struct{})
	defer close(done)
	go x.forward(signals, done)
	if x.start.GetStdin() {
		go x.input(x.app.stdin)
	}
	select {
	case r := <-ended:
		x.finish()
		return r.exit, r.err
	case err := <-x.abort:
		x.finish()
		return nil, err
	}
}

// finish wakes the reader of standard input; it may go on to block in its read, which
// ends with the process.
func (x *execSession) finish() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.over = true
	x.room.Broadcast()
}

func (x *execSession) rawMode() (restore func(), err error) {
	if x.start.GetTty() == nil || !x.start.GetStdin() {
		return func() {}, nil
	}
	fd := int(x.app.stdin.Fd())
	old, err := term.MakeRaw(fd)
	if err != nil {
		return nil, err
	}
	return func() { _ = term.Restore(fd, old) }, nil // nothing else could be done
}

func (x *execSession) request(m *cubev1.ExecSandboxRequest) error {
	x.send.Lock()
	defer x.send.Unlock()
	return x.stream.Send(m)
}

// cause replaces the io.EOF of a failed send with the reason that the node gave.
func (x *execSession) cause(err error) error {
	if !errors.Is(err, io.EOF) {
		return err
	}
	if _, reason := x.stream.Receive(); reason != nil {
		return reason
	}
	return err
}

// output copies what the program writes until it has ended.
func (x *execSession) output() (*cubev1.ExecExited, error) {
	for {
		m, err := x.stream.Receive()
		if errors.Is(err, io.EOF) {
			return nil, cube.Errorf(cube.CodeUnavailable, "the connection ended before the program did")
		}
		if err != nil {
			return nil, err
		}
		if err := x.take(m); err != nil {
			return nil, err
		}
		if exit := m.GetExited(); exit != nil {
			return exit, nil
		}
	}
}

func (x *execSession) take(m *cubev1.ExecSandboxResponse) error {
	var err error
	switch r := m.GetResponse().(type) {
	case *cubev1.ExecSandboxResponse_Stdout:
		_, err = x.app.stdout.Write(r.Stdout)
	case *cubev1.ExecSandboxResponse_Stderr:
		_, err = x.app.stderr.Write(r.Stderr)
	case *cubev1.ExecSandboxResponse_Tty:
		_, err = x.app.stdout.Write(r.Tty)
	case *cubev1.ExecSandboxResponse_StdinTaken:
		x.mu.Lock()
		x.taken = r.StdinTaken
		x.room.Broadcast()
		x.mu.Unlock()
	}
	return err
}

// input sends standard input, never far ahead of the program.
func (x *execSession) input(r io.Reader) {
	buf := make([]byte, stdinChunk)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if !x.waitForRoom(uint64(n)) {
				return
			}
			chunk := append([]byte(nil), buf[:n]...)
			if x.request(&cubev1.ExecSandboxRequest{Request: &cubev1.ExecSandboxRequest_Stdin{Stdin: chunk}}) != nil {
				return // output has the reason
			}
		}
		if err != nil {
			_ = x.request(&cubev1.ExecSandboxRequest{Request: &cubev1.ExecSandboxRequest_CloseStdin{CloseStdin: &cubev1.ExecCloseStdin{}}})
			return
		}
	}
}

func (x *execSession) waitForRoom(n uint64) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	for x.sent+n > x.taken+stdinAhead && !x.over {
		x.room.Wait()
	}
	x.sent += n
	return !x.over
}

// forwarded lists the signals that go to the program: all that can be caught, except
// those about cubecli's own terminal job, children and pipes.
func forwarded() []os.Signal {
	return []os.Signal{
		syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGALRM, syscall.SIGWINCH,
	}
}

// forward passes signals on until done.
func (x *execSession) forward(signals <-chan os.Signal, done <-chan struct{}) {
	interrupts := 0
	for {
		select {
		case <-done:
			return
		case s := <-signals:
			if s == syscall.SIGINT || s == syscall.SIGTERM {
				interrupts++
			}
			if interrupts > patience {
				x.abort <- cube.Errorf(cube.CodeCanceled, "the program ignores signals; it goes on in the sandbox")
				return
			}
			if m := x.message(s); m != nil && x.request(m) != nil {
				return // output has the reason
			}
		}
	}
}

func (x *execSession) message(s os.Signal) *cubev1.ExecSandboxRequest {
	number, ok := s.(syscall.Signal)
	switch {
	case !ok:
		return nil
	case number != syscall.SIGWINCH:
		return &cubev1.ExecSandboxRequest{Request: &cubev1.ExecSandboxRequest_Signal{Signal: int32(number)}}
	case x.start.GetTty() == nil:
		return nil
	}
	return &cubev1.ExecSandboxRequest{Request: &cubev1.ExecSandboxRequest_Resize{Resize: x.app.windowSize()}}
}

// windowSize is the size of cubecli's terminal, or the usual one without a terminal.
func (a *app) windowSize() *cubev1.WindowSize {
	for _, f := range []*os.File{a.stdout, a.stdin, a.stderr} {
		if !isTerminal(f) {
			continue
		}
		if cols, rows, err := term.GetSize(int(f.Fd())); err == nil && cols > 0 && rows > 0 {
			return &cubev1.WindowSize{Cols: uint32(cols), Rows: uint32(rows)}
		}
	}
	return &cubev1.WindowSize{Cols: 80, Rows: 24}
}
