package cube

import "time"

// AgentPort is the TCP port of the guest agent, envd's in E2B's protocol.
const AgentPort = 49983

// ExecSpec is a program to run in a guest.
type ExecSpec struct {
	// Args is the program and its arguments. Empty runs the image's entrypoint and
	// command.
	Args []string
	Env  map[string]string
	Cwd  string // empty: the image's working directory, else the user's home
	User string // empty: the sandbox's default user
	// Stdin connects standard input; otherwise it is /dev/null.
	Stdin bool
	// TTY gives the program a terminal of that size.
	TTY *WindowSize
	// Timeout kills the program when it ends. Zero means none.
	Timeout time.Duration
}

// WindowSize is a terminal's size in character cells.
type WindowSize struct {
	Cols, Rows uint32
}

// ExecStream tells which of a program's outputs data came from.
type ExecStream int

// The streams of a program.
const (
	StreamStdout ExecStream = iota + 1
	StreamStderr
	StreamTTY
)

// ExecEvent is one event of a session. Exactly one of the fields is set: PID on the
// first event, Data in between, Exit on the last.
type ExecEvent struct {
	PID    uint32
	Stream ExecStream
	Data   []byte // valid until the next Recv
	Exit   *ExecExit
}

// ExecExit tells how a program ended.
type ExecExit struct {
	// Code is the exit code, or 128 plus the number of the signal that killed it.
	Code   int
	Signal string // for example "SIGKILL", empty when it exited by itself
	Status string // as the guest words it, for example "exit status 3"
	Error  string // why it ended when it was not its own doing, for example a deadline
}

// ExecSession is a running program. Recv and the Send methods may be used at the same
// time, each by one goroutine; Signal and Resize also while SendStdin blocks. Closing the
// session lets the program live on and ends a blocked Recv or SendStdin; it may be called
// more than once.
type ExecSession interface {
	// Recv returns the next event, and io.EOF after the exit event.
	Recv() (ExecEvent, error)
	SendStdin(b []byte) error
	CloseStdin() error
	// Signal sends a signal by number. Codes: NotFound when the program is gone.
	Signal(sig int) error
	Resize(ws WindowSize) error
	Close() error
}
