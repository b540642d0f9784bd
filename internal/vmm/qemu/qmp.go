package qemu

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Bounds on what a QEMU may say: it runs the guest's code, so it is not trusted.
const (
	maxMessage = 1 << 20 // bytes of one line
	maxEvents  = 1024    // kept while waiting for an answer
)

// qmp is one connection to a QEMU monitor, for one call of the driver: no connection
// is kept, so none breaks when the daemon is restarted. QEMU serves one at a time; the
// next waits in the listener's backlog.
type qmp struct {
	conn   *net.UnixConn
	in     *bufio.Scanner
	events []qmpEvent // seen and not yet consumed, oldest first
	nextID int
	stop   func() bool
}

// qmpMessage is one line from QEMU; exactly one of the pointers is set.
type qmpMessage struct {
	Greeting *json.RawMessage
	Return   *json.RawMessage
	Error    *qmpError
	Event    *qmpEvent
	ID       string // of the answered command
}

type qmpEvent struct {
	Name string
	Data json.RawMessage
}

// qmpError is a command that QEMU refused.
type qmpError struct {
	Class string `json:"class"`
	Desc  string `json:"desc"`
}

func (e *qmpError) Error() string { return e.Desc }

// dialQMP connects to the monitor, waits until QEMU answers and ends the negotiation.
// ctx bounds the whole life of the connection. The caller closes it.
func dialQMP(ctx context.Context, path string) (*qmp, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("connect to QEMU: %w", err)
	}
	c := &qmp{conn: conn.(*net.UnixConn), in: bufio.NewScanner(conn)}
	c.in.Buffer(make([]byte, 0, 4096), maxMessage)
	c.stop = context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	if err := c.negotiate(ctx); err != nil {
		c.close()
		return nil, err
	}
	return c, nil
}

func (c *qmp) close() {
	c.stop()
	_ = c.conn.Close()
}

func (c *qmp) negotiate(ctx context.Context) error {
	m, err := c.read(ctx)
	if err != nil {
		return err
	}
	if m.Greeting == nil {
		return errors.New("QEMU does not greet: the socket is not a QMP monitor")
	}
	return c.execute(ctx, call{name: "qmp_capabilities"})
}

// call is one command.
type call struct {
	name   string
	args   map[string]any
	result any      // the answer is decoded into it unless it is nil
	file   *os.File // passed along unless it is nil; stays the caller's
}

// execute runs one command. An *qmpError is QEMU's refusal.
func (c *qmp) execute(ctx context.Context, cmd call) error {
	id, err := c.send(cmd)
	if err != nil {
		return c.fault(ctx, cmd.name, err)
	}
	m, err := c.answer(ctx)
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w", cmd.name, err)
	case m.ID != id:
		return fmt.Errorf("%s: QEMU answers %.40q, not %q", cmd.name, m.ID, id)
	case m.Error != nil:
		return fmt.Errorf("%s: %w", cmd.name, m.Error)
	case m.Return == nil:
		return fmt.Errorf("%s: QEMU greets again", cmd.name)
	case cmd.result == nil:
		return nil
	}
	if err := json.Unmarshal(*m.Return, cmd.result); err != nil {
		return fmt.Errorf("%s: unexpected answer: %w", cmd.name, err)
	}
	return nil
}

// answer reads up to the next message that is no event, and keeps the events.
func (c *qmp) answer(ctx context.Context) (qmpMessage, error) {
	for {
		m, err := c.read(ctx)
		if err != nil || m.Event == nil {
			return m, err
		}
		if len(c.events) == maxEvents {
			return m, errors.New("QEMU sends events and no answer")
		}
		c.events = append(c.events, *m.Event)
	}
}

func (c *qmp) send(cmd call) (id string, err error) {
	c.nextID++
	id = strconv.Itoa(c.nextID)
	line, err := json.Marshal(struct {
		Execute   string         `json:"execute"`
		Arguments map[string]any `json:"arguments,omitempty"`
		ID        string         `json:"id"`
	}{cmd.name, cmd.args, id})
	if err != nil {
		return "", err
	}
	line = append(line, '\n')
	if cmd.file == nil {
		_, err = c.conn.Write(line)
		return id, err
	}
	raw, err := cmd.file.SyscallConn()
	if err != nil {
		return "", err
	}
	// Not File.Fd, which would make the file blocking behind its owner's back.
	cerr := raw.Control(func(fd uintptr) {
		_, _, err = c.conn.WriteMsgUnix(line, unix.UnixRights(int(fd)), nil)
	})
	return id, errors.Join(cerr, err)
}

// await returns the data of the first event for which match returns true; events before
// it are dropped.
func (c *qmp) await(ctx context.Context, match func(qmpEvent) bool) (qmpEvent, error) {
	for {
		for len(c.events) > 0 {
			e := c.events[0]
			c.events = c.events[1:]
			if match(e) {
				return e, nil
			}
		}
		m, err := c.read(ctx)
		if err != nil {
			return qmpEvent{}, err
		}
		if m.Event != nil {
			c.events = append(c.events, *m.Event)
		}
	}
}

func (c *qmp) read(ctx context.Context) (qmpMessage, error) {
	if !c.in.Scan() {
		err := c.in.Err()
		if err == nil {
			err = errGone
		}
		return qmpMessage{}, c.fault(ctx, "read from QEMU", err)
	}
	m, err := decodeQMP(c.in.Bytes())
	if err != nil {
		return qmpMessage{}, fmt.Errorf("read from QEMU: %w", err)
	}
	return m, nil
}

// errGone means that QEMU ended or closed the monitor.
var errGone = errors.New("QEMU is gone")

// fault explains an I/O error: the context's end is why a deadline passed, and a reset
// or broken connection means the same as its end.
func (c *qmp) fault(ctx context.Context, what string, err error) error {
	switch {
	case ctx.Err() != nil:
		err = ctx.Err()
	case errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE):
		err = errGone
	}
	return fmt.Errorf("%s: %w", what, err)
}

// decodeQMP decodes one line from QEMU.
func decodeQMP(line []byte) (qmpMessage, error) {
	var raw struct {
		QMP    *json.RawMessage `json:"QMP"`
		Return *json.RawMessage `json:"return"`
		Error  *qmpError        `json:"error"`
		Event  *string          `json:"event"`
		Data   json.RawMessage  `json:"data"`
		ID     string           `json:"id"`
	}
	if err := json.Unmarshal(line, &raw); err != nil {
		return qmpMessage{}, fmt.Errorf("malformed message: %w", err)
	}
	m := qmpMessage{Greeting: raw.QMP, Return: raw.Return, Error: raw.Error, ID: raw.ID}
	kinds := 0
	for _, set := range [...]bool{raw.QMP != nil, raw.Return != nil, raw.Error != nil, raw.Event != nil} {
		if set {
			kinds++
		}
	}
	if kinds != 1 {
		return qmpMessage{}, fmt.Errorf("message of %d kinds: %.80q", kinds, line)
	}
	if raw.Event != nil {
		m.Event = &qmpEvent{Name: *raw.Event, Data: raw.Data}
	}
	return m, nil
}
