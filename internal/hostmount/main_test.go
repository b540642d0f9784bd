package hostmount

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cubelet/internal/testenv"
)

// The test binary is three programs: the first starts the second in a mount namespace
// that plays the host, with all mounts shared as systemd has them; the second runs the
// tests; the third is the daemon that they start.
const (
	hostEnv   = "CUBE_HOSTMOUNT_TEST_HOST"
	daemonEnv = "CUBE_HOSTMOUNT_TEST_DAEMON" // JSON of daemonOptions
)

func TestMain(m *testing.M) {
	switch {
	case os.Getenv(daemonEnv) != "":
		if err := runDaemon(os.Getenv(daemonEnv)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	case os.Getenv(hostEnv) != "":
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
			fmt.Fprintln(os.Stderr, "share mounts:", err)
			os.Exit(1)
		}
		os.Exit(m.Run())
	case os.Geteuid() != 0:
		os.Exit(m.Run())
	default:
		os.Exit(runHost())
	}
}

func runHost() int {
	runtime.LockOSThread() // the death signal below is tied to the thread
	cmd := exec.Command(os.Args[0], os.Args[1:]...)
	cmd.Env = append(os.Environ(), hostEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		return exit.ExitCode()
	case err != nil:
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// daemonOptions configure one daemon.
type daemonOptions struct {
	Dir      string
	Hang     []string // steps that never end
	Fail     []string // steps that fail
	Deadline time.Duration
}

// daemonState is what a daemon says of itself once it runs.
type daemonState struct {
	PID       int
	Namespace string
	Inside    bool
	Error     string // of Enter
	Args      []string
	Dir       string // working directory
	Env       string // CUBE_TEST_VALUE
}

// runDaemon enters the namespace, says what it is, and then obeys lines on standard
// input: "mount PATH" (a tmpfs) and "exists PATH".
func runDaemon(options string) error {
	var o daemonOptions
	if err := json.Unmarshal([]byte(options), &o); err != nil {
		return err
	}
	enterErr := Enter(Config{
		Dir: o.Dir, deadline: o.Deadline, Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
		hook: func(step string) error {
			if slices.Contains(o.Hang, step) {
				select {}
			}
			if slices.Contains(o.Fail, step) {
				return errors.New("broken by the test")
			}
			return nil
		},
	})
	state := daemonState{PID: os.Getpid(), Inside: Inside(o.Dir), Args: os.Args[1:], Env: os.Getenv("CUBE_TEST_VALUE")}
	var err error
	if state.Namespace, err = ownNamespace(); err != nil {
		return err
	}
	if state.Dir, err = os.Getwd(); err != nil {
		return err
	}
	if enterErr != nil {
		state.Error = enterErr.Error()
	}
	if err := json.NewEncoder(os.Stdout).Encode(state); err != nil {
		return err
	}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		fmt.Println(obey(lines.Text()))
	}
	return nil
}

func obey(line string) string {
	verb, path, _ := strings.Cut(line, " ")
	switch verb {
	case "mount":
		if err := unix.Mount("tmpfs", path, "tmpfs", 0, "size=1m"); err != nil {
			return err.Error()
		}
		if err := os.WriteFile(filepath.Join(path, "inside"), nil, 0o600); err != nil {
			return err.Error()
		}
		return "ok"
	case "exists":
		_, err := os.Lstat(path)
		return fmt.Sprint(err == nil)
	}
	return "unknown: " + line
}

// daemon is a running daemon.
type daemon struct {
	daemonState
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

func startDaemon(t *testing.T, o daemonOptions, args ...string) *daemon {
	t.Helper()
	return startDaemonIn(t, o, t.TempDir(), args...)
}

func startDaemonIn(t *testing.T, o daemonOptions, cwd string, args ...string) *daemon {
	t.Helper()
	options, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), exe, args...)
	cmd.Env = append(os.Environ(), daemonEnv+"="+string(options), "CUBE_TEST_VALUE=kept")
	cmd.Dir = cwd
	cmd.Stderr = t.Output()
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	d := &daemon{t: t, cmd: cmd, in: in, out: bufio.NewScanner(out)}
	t.Cleanup(d.kill)
	if !d.out.Scan() {
		t.Fatalf("the daemon ended before it ran: %v", cmd.Wait())
	}
	if err := json.Unmarshal(d.out.Bytes(), &d.daemonState); err != nil {
		t.Fatal(err)
	}
	return d
}

// do sends a command and returns the answer.
func (d *daemon) do(format string, args ...any) string {
	d.t.Helper()
	if _, err := fmt.Fprintf(d.in, format+"\n", args...); err != nil {
		d.t.Fatal(err)
	}
	if !d.out.Scan() {
		d.t.Fatal("the daemon ended")
	}
	return d.out.Text()
}

// kill ends the daemon with SIGKILL and waits for it.
func (d *daemon) kill() {
	if d.cmd.ProcessState == nil {
		_ = d.cmd.Process.Kill()
		_ = d.cmd.Wait()
	}
}

// testRoot returns the root of a node of which the namespace is released at the end.
func testRoot(t *testing.T) (root, dir string) {
	t.Helper()
	testenv.RequireRoot(t)
	root = testenv.TempRoot(t)
	dir = filepath.Join(root, "run", "mnt")
	t.Cleanup(func() {
		if err := Release(dir); err != nil {
			t.Error(err)
		}
	})
	return root, dir
}

func mkdir(t *testing.T, path string) string {
	t.Helper()
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}
