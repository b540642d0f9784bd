package agent

import (
	"context"
	"errors"
	"sync"

	"github.com/cubesandbox/cubelet/internal/agent/wire"
)

// inputQueue holds the input of a host's program until the program takes it. It never
// holds more than the window, and what it holds when the host leaves is still passed on.
type inputQueue struct {
	session *hostSession

	mu       sync.Mutex
	pieces   [][]byte // an empty piece ends the input
	size     int
	finished bool
	ready    chan struct{} // holds a token when there is something to do; nil: not started
}

var errWindow = errors.New("the host sent more input than the window allows")

// add queues a copy of b.
func (q *inputQueue) add(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.size += len(b); q.size > wire.Window {
		return errWindow
	}
	q.push(append([]byte(nil), b...))
	return nil
}

// end closes the input after what is queued.
func (q *inputQueue) end() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.push(nil)
}

// finish says that nothing will follow.
func (q *inputQueue) finish() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.finished = true
	if q.ready != nil {
		q.wake()
	}
}

// push appends a piece; q.mu is held.
func (q *inputQueue) push(b []byte) {
	q.pieces = append(q.pieces, b)
	if q.ready == nil {
		q.ready = make(chan struct{}, 1)
		go q.run()
	}
	q.wake()
}

func (q *inputQueue) wake() {
	select {
	case q.ready <- struct{}{}:
	default:
	}
}

// run passes the pieces on. What the program does not take, because it has closed its
// input or ended, is dropped.
func (q *inputQueue) run() {
	p := q.session.p
	for range q.ready {
		q.mu.Lock()
		pieces, finished := q.pieces, q.finished
		q.pieces = nil
		q.mu.Unlock()
		for _, b := range pieces {
			if b == nil {
				_ = p.closeStdin() // on a terminal the host types an end-of-file instead
				continue
			}
			_ = p.write(context.Background(), b, p.spec.pty != nil)
			q.taken(len(b))
		}
		if finished {
			return
		}
	}
}

// taken frees room in the window and has it acknowledged.
func (q *inputQueue) taken(n int) {
	q.mu.Lock()
	q.size -= n
	q.mu.Unlock()
	acks := q.session.acks
	select {
	case old := <-acks:
		n += old
	default:
	}
	select {
	case acks <- n:
	case <-q.session.gone:
	}
}
