package agent

import "sync"

// Limits of what a subscriber may leave unread, in bytes.
const (
	softBacklog = 256 << 10 // a program waits when every subscriber has more
	hardBacklog = 4 << 20   // a subscriber with more is cut off
)

// stream tells which output of a program a chunk came from.
type stream uint8

const (
	streamStdout stream = iota + 1
	streamStderr
	streamPTY
)

// chunk is a piece of output. Its data is shared by all subscribers and never changed.
type chunk struct {
	stream stream
	data   []byte
}

// hub passes the output of one program to any number of subscribers.
//
// The program runs at the speed of its fastest reader: with one subscriber that is
// slow, the program waits as it would at a pipe; with several, the slow ones queue up
// to hardBacklog and are then cut off, so that they hold nobody up. Without subscribers
// output is dropped.
type hub struct {
	mu   sync.Mutex
	room sync.Cond // signalled when a subscriber took its queue or left
	subs []*subscriber
	end  *exit // set once, after the last chunk
}

// subscriber is one reader of a hub.
type subscriber struct {
	hub   *hub
	queue []chunk
	size  int
	cut   bool
	// ready holds a token when there is something to take.
	ready chan struct{}
}

func (h *hub) init() { h.room.L = &h.mu }

// subscribe adds a reader of everything that is published from now on.
func (h *hub) subscribe() *subscriber {
	s := &subscriber{hub: h, ready: make(chan struct{}, 1)}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.end != nil {
		s.wake()
		return s
	}
	h.subs = append(h.subs, s)
	return s
}

// publish hands c to every subscriber and blocks while none of them has room.
func (h *hub) publish(c chunk) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for !h.hasRoom() {
		h.room.Wait()
	}
	kept := h.subs[:0]
	for _, s := range h.subs {
		if s.size+len(c.data) > hardBacklog {
			s.cut, s.queue, s.size = true, nil, 0
		} else {
			s.queue = append(s.queue, c)
			s.size += len(c.data)
			kept = append(kept, s)
		}
		s.wake()
	}
	clear(h.subs[len(kept):])
	h.subs = kept
}

func (h *hub) hasRoom() bool {
	for _, s := range h.subs {
		if s.size < softBacklog {
			return true
		}
	}
	return len(h.subs) == 0
}

// close tells every subscriber, after what is queued, how the program ended.
func (h *hub) close(e *exit) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.end = e
	for _, s := range h.subs {
		s.wake()
	}
	h.subs = nil
}

// ended returns how the program ended, nil while it runs.
func (h *hub) ended() *exit {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.end
}

func (s *subscriber) wake() {
	select {
	case s.ready <- struct{}{}:
	default:
	}
}

// take returns what is queued and, when nothing will follow it, the end of the program.
// cut means that the subscriber was too slow and lost output.
func (s *subscriber) take() (chunks []chunk, end *exit, cut bool) {
	s.hub.mu.Lock()
	defer s.hub.mu.Unlock()
	chunks, s.queue, s.size = s.queue, nil, 0
	s.hub.room.Broadcast()
	return chunks, s.hub.end, s.cut
}

// leave ends the subscription. It may be called more than once.
func (s *subscriber) leave() {
	s.hub.mu.Lock()
	defer s.hub.mu.Unlock()
	for i, o := range s.hub.subs {
		if o == s {
			s.hub.subs = append(s.hub.subs[:i], s.hub.subs[i+1:]...)
			break
		}
	}
	s.hub.room.Broadcast()
}
