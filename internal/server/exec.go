package server

import (
	"context"
	"errors"
	"io"
	"sync"

	"connectrpc.com/connect"

	cube "github.com/cubesandbox/cubelet"
	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

// stdinAheadBytes is how much standard input waits in the server for a program that
// does not read. A client that stays below it never blocks its own signals.
const stdinAheadBytes = 512 << 10

type execStream = connect.BidiStream[cubev1.ExecSandboxRequest, cubev1.ExecSandboxResponse]

// ExecSandbox implements cubev1connect.SandboxServiceHandler. The program lives on when
// the client goes away.
func (s *sandboxService) ExecSandbox(ctx context.Context, stream *execStream) error {
	start, err := receiveStart(stream)
	if err != nil {
		return err
	}
	spec, err := toExecSpec(start)
	if err != nil {
		return err
	}
	session, err := s.sandboxes.Exec(ctx, start.GetSandboxId(), spec)
	if err != nil {
		return err
	}
	call := &execCall{
		stream:    stream,
		session:   session,
		withStdin: spec.Stdin,
		stdin:     newStdinQueue(stdinAheadBytes),
		failed:    make(chan error, 1),
	}
	return call.run(ctx)
}

func receiveStart(stream *execStream) (*cubev1.ExecStart, error) {
	first, err := stream.Receive()
	switch {
	case errors.Is(err, io.EOF):
		return nil, cube.InvalidField("start", "the stream has no message; the first must be start")
	case err != nil:
		return nil, err
	case first.GetStart() == nil:
		return nil, cube.InvalidField("start", "the first message must be start")
	}
	return first.GetStart(), nil
}

// execCall joins one client's stream to one session. Three goroutines work on it: output
// (the caller of run), input (reads the stream) and feed (writes standard input).
type execCall struct {
	stream    *execStream
	session   cube.ExecSession
	withStdin bool // the program has standard input
	stdin     *stdinQueue
	failed    chan error // the first error of input

	mu     sync.Mutex // serialises stream.Send
	exited bool       // the last message is sent
}

func (c *execCall) run(ctx context.Context) error {
	var workers sync.WaitGroup
	defer workers.Wait()
	defer c.session.Close() //nolint:errcheck // the program's end is what counts
	defer c.stdin.close()
	// A client that is gone must not leave output or feed waiting for the guest.
	stop := context.AfterFunc(ctx, func() {
		c.stdin.close()
		c.session.Close() //nolint:errcheck // see above
	})
	defer stop()

	workers.Go(c.feed)
	// Not waited for: Receive returns only when the client speaks or the call is over.
	go c.input()
	err := c.output()
	select {
	case inputErr := <-c.failed:
		return inputErr
	default:
	}
	if err != nil && ctx.Err() != nil {
		return ctx.Err() // what broke, broke because the call was over
	}
	return err
}

// output sends the session's events until the program has ended.
func (c *execCall) output() error {
	for {
		ev, err := c.session.Recv()
		if errors.Is(err, io.EOF) {
			return cube.Errorf(cube.CodeUnavailable, "the session ended before the program did")
		}
		if err != nil {
			return err
		}
		if err := c.send(fromExecEvent(ev)); err != nil {
			return err
		}
		if ev.Exit != nil {
			return nil
		}
	}
}

func (c *execCall) send(m *cubev1.ExecSandboxResponse) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.exited {
		return nil
	}
	c.exited = m.GetExited() != nil
	return c.stream.Send(m)
}

// input obeys the client's messages until it closes its side.
func (c *execCall) input() {
	for {
		m, err := c.stream.Receive()
		if err != nil {
			// Half-closed: there is no more input. Gone: the context ends the call.
			c.stdin.end()
			return
		}
		if err := c.obey(m); err != nil {
			c.failed <- err
			c.session.Close() //nolint:errcheck // ends output, which reports err
			return
		}
	}
}

func (c *execCall) obey(m *cubev1.ExecSandboxRequest) error {
	switch r := m.GetRequest().(type) {
	case *cubev1.ExecSandboxRequest_Stdin:
		if !c.withStdin {
			return cube.InvalidField("stdin", "the program has no standard input").WithHint("Set start.stdin.")
		}
		c.stdin.push(r.Stdin)
		return nil
	case *cubev1.ExecSandboxRequest_CloseStdin:
		c.stdin.end()
		return nil
	case *cubev1.ExecSandboxRequest_Signal:
		if r.Signal < 1 || r.Signal > 64 {
			return cube.InvalidField("signal", "%d is not between 1 and 64", r.Signal)
		}
		return ignoreGone(c.session.Signal(int(r.Signal)))
	case *cubev1.ExecSandboxRequest_Resize:
		var chk check
		ws := chk.windowSize("resize", r.Resize)
		if chk.err != nil {
			return chk.err
		}
		return ignoreGone(c.session.Resize(ws))
	case *cubev1.ExecSandboxRequest_Start:
		return cube.InvalidField("start", "the program is already started")
	}
	return cube.InvalidField("request", "the message is empty")
}

// ignoreGone drops NotFound: the program has ended and its exit event is on the way.
func ignoreGone(err error) error {
	if cube.IsNotFound(err) {
		return nil
	}
	return err
}

// feed hands standard input to the program. A program that takes no more input, like
// head, ends normally: what it did not want is dropped.
func (c *execCall) feed() {
	var taken uint64
	refused := false
	for {
		b, ok := c.stdin.pop()
		if !ok {
			break
		}
		if !refused {
			refused = c.session.SendStdin(b) != nil
		}
		taken += uint64(len(b))
		ack := &cubev1.ExecSandboxResponse{Response: &cubev1.ExecSandboxResponse_StdinTaken{StdinTaken: taken}}
		if c.send(ack) != nil {
			return
		}
	}
	if c.withStdin && c.stdin.ended() {
		_ = c.session.CloseStdin() // refused only by a program that is gone
	}
}

// stdinQueue holds standard input in order, up to a number of bytes.
type stdinQueue struct {
	mu     sync.Mutex
	change *sync.Cond
	chunks [][]byte
	bytes  int
	limit  int
	eof    bool // no more input will come
	closed bool // nobody wants the input any more
}

func newStdinQueue(limit int) *stdinQueue {
	q := &stdinQueue{limit: limit}
	q.change = sync.NewCond(&q.mu)
	return q
}

// push adds b, which the queue keeps. It blocks while the queue is full.
func (q *stdinQueue) push(b []byte) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.bytes >= q.limit && !q.closed {
		q.change.Wait()
	}
	if q.eof || q.closed || len(b) == 0 {
		return
	}
	q.chunks = append(q.chunks, b)
	q.bytes += len(b)
	q.change.Broadcast()
}

// pop returns the next chunk, or false at the end.
func (q *stdinQueue) pop() ([]byte, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.chunks) == 0 && !q.eof && !q.closed {
		q.change.Wait()
	}
	if q.closed || len(q.chunks) == 0 {
		return nil, false
	}
	b := q.chunks[0]
	q.chunks = q.chunks[1:]
	q.bytes -= len(b)
	q.change.Broadcast()
	return b, true
}

// end marks the end of the input; what is queued is still delivered.
func (q *stdinQueue) end() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.eof = true
	q.change.Broadcast()
}

// close drops the input and wakes everyone.
func (q *stdinQueue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.change.Broadcast()
}

// ended reports whether the input ended, as opposed to being dropped.
func (q *stdinQueue) ended() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.eof && !q.closed
}
