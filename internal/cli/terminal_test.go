package cli_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cubelet/internal/cubetest"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

// terminal runs a program on a terminal of its own.
type terminal struct {
	t    *testing.T
	cmd  *exec.Cmd
	tty  *os.File // our side
	done chan struct{}

	mu  sync.Mutex
	out bytes.Buffer
}

func newTerminal(t *testing.T, address string, argv ...string) *terminal {
	t.Helper()
	x := &terminal{t: t, cmd: exec.CommandContext(t.Context(), argv[0], argv[1:]...), done: make(chan struct{})}
	x.cmd.Env = append(os.Environ(), "CUBELET_ADDRESS="+address, "TERM=xterm")
	var err error
	if x.tty, err = pty.StartWithSize(x.cmd, &pty.Winsize{Cols: 100, Rows: 30}); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(x.done)
		buf := make([]byte, 4096)
		for {
			n, err := x.tty.Read(buf)
			x.mu.Lock()
			x.out.Write(buf[:n])
			x.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() { _ = x.tty.Close() })
	return x
}

func (x *terminal) output() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.out.String()
}

func (x *terminal) until(text string) {
	x.t.Helper()
	testenv.Eventually(x.t, 20*time.Second, func() error {
		if out := x.output(); !strings.Contains(out, text) {
			return fmt.Errorf("no %q in %q", text, out)
		}
		return nil
	})
}

func (x *terminal) write(s string) {
	x.t.Helper()
	if _, err := x.tty.WriteString(s); err != nil {
		x.t.Fatal(err)
	}
}

// end waits for cubecli and returns its exit code.
func (x *terminal) end() int {
	x.t.Helper()
	err := x.cmd.Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		x.t.Fatal(err)
	}
	<-x.done
	return x.cmd.ProcessState.ExitCode()
}

// echoes reports whether the terminal echoes, which it does not in raw mode.
func (x *terminal) echoes() bool {
	x.t.Helper()
	term, err := unix.IoctlGetTermios(int(x.tty.Fd()), unix.TCGETS)
	if err != nil {
		x.t.Fatal(err)
	}
	return term.Lflag&unix.ECHO != 0
}

func newNode(t *testing.T) (*cubetest.Node, string) {
	t.Helper()
	n := cubetest.New(t)
	address := serve(t, n)
	x := newTerminal(t, address, "cubecli", "sandbox", "create", "--template-id", "base")
	if code := x.end(); code != 0 {
		t.Fatalf("exit code %d: %s", code, x.output())
	}
	for _, want := range []string{"s00001x\r\n", "STAGE    START    TIME\r\n", "launch   2.0 ms   40.0 ms\r\n"} {
		if !strings.Contains(x.output(), want) {
			t.Fatalf("no %q in %q", want, x.output())
		}
	}
	return n, address
}

func TestShellOnATerminal(t *testing.T) {
	_, address := newNode(t)
	x := newTerminal(t, address, "cubecli", "sandbox", "exec", "-it", "s00001x", "sh", "-c",
		`trap 'echo "now $(stty size)"' WINCH; stty -echo; echo "at $(stty size) $TERM"; while read l; do echo "<$l>"; done; exit 6`)
	x.until("at 30 100 xterm")
	if x.echoes() {
		t.Error("the terminal is not in raw mode")
	}
	x.write("hello\r")
	x.until("<hello>")
	if err := pty.Setsize(x.tty, &pty.Winsize{Cols: 120, Rows: 40}); err != nil {
		t.Fatal(err)
	}
	x.until("now 40 120")
	x.write("\x04") // end of file
	if code := x.end(); code != 6 {
		t.Errorf("exit code %d", code)
	}
}

func TestInterruptKeyReachesTheProgramAndTheTerminalIsRestored(t *testing.T) {
	_, address := newNode(t)
	// The shell keeps the terminal open after cubecli, so that its state can be seen.
	x := newTerminal(t, address, "sh", "-c", "cubecli sandbox exec -it s00001x sh -c 'echo ready; exec sleep 60'; echo code $?; read wait")
	x.until("ready")
	if x.echoes() {
		t.Error("the terminal is not in raw mode")
	}
	x.write("\x03")
	x.until("code 130")
	if !x.echoes() {
		t.Error("the terminal was left in raw mode")
	}
	x.write("\n")
	x.end()
}

func TestTerminalIsRestoredWhenTheNodeGoes(t *testing.T) {
	n := cubetest.New(t)
	address, stop := serveUntil(t, n)
	if code := newTerminal(t, address, "cubecli", "sandbox", "create", "--template-id", "base").end(); code != 0 {
		t.Fatal(code)
	}
	x := newTerminal(t, address, "sh", "-c", "cubecli sandbox exec -it s00001x sh -c 'echo ready; exec sleep 60'; echo code $?; read wait")
	x.until("ready")
	stop()
	x.until("code 125")
	x.until("Error: exec: the node is shutting down (Unavailable)")
	if !x.echoes() {
		t.Error("the terminal was left in raw mode")
	}
	x.write("\n")
	x.end()
}

func TestProgressOfABuildIsABar(t *testing.T) {
	_, address := newNode(t)
	x := newTerminal(t, address, "cubecli", "template", "create", "--name", "web", "registry.test/web")
	if code := x.end(); code != 0 {
		t.Fatal(code)
	}
	for _, want := range []string{"\x1b[K", "pull: layer 1 of 1  [====================] 100%  2 MiB / 2 MiB", "tpl-new00"} {
		if !strings.Contains(x.output(), want) {
			t.Errorf("no %q in %q", want, x.output())
		}
	}
}

func TestConsoleOfAGuestCannotChangeTheTerminal(t *testing.T) {
	n, address := newNode(t)
	n.SetLogs("a\x1b]0;title\x07b\r\nc\u009bd\n")
	x := newTerminal(t, address, "cubecli", "sandbox", "logs", "s00001x")
	x.end()
	if got, want := x.output(), "a\uFFFD]0;title\uFFFDb\r\nc\uFFFDd\r\n"; got != want {
		t.Errorf("output %q", got)
	}
}
