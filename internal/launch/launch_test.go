package launch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The test binary plays the launcher and the launched program too.
func TestMain(m *testing.M) {
	switch {
	case len(os.Args) == 3 && os.Args[1] == "launcher":
		err := Serve(os.Args[2])
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	case len(os.Args) > 1 && os.Args[1] == "program":
		program()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

type programFacts struct {
	Args, Env []string
	Open      []int
	Texts     map[int]string
	CoreMask  string
}

// program writes what it sees to descriptor 1.
func program() {
	f := programFacts{Args: os.Args, Env: os.Environ(), Texts: map[int]string{}}
	for fd := range 64 {
		var st unix.Stat_t
		if unix.Fstat(fd, &st) != nil {
			continue
		}
		if flags, _ := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); flags&unix.FD_CLOEXEC != 0 {
			continue // the Go runtime's own
		}
		f.Open = append(f.Open, fd)
		if st.Mode&unix.S_IFMT == unix.S_IFREG && fd > 2 {
			buf := make([]byte, 100)
			n, _ := unix.Pread(fd, buf, 0)
			f.Texts[fd] = string(buf[:n])
		}
	}
	mask, _ := os.ReadFile("/proc/self/coredump_filter")
	f.CoreMask = strings.TrimSpace(string(mask))
	data, _ := json.Marshal(f)
	_, _ = unix.Write(1, data)
}

// startLauncher returns its socket and a channel with the result of the process.
func startLauncher(t *testing.T) (string, *exec.Cmd) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("only root may command a launcher: run this test as root")
	}
	// A path that no socket address could hold, seen by the launcher through its
	// working directory.
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", 120))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self(t), "launcher", "launch.sock")
	cmd.Dir = dir
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	socket := filepath.Join(dir, "launch.sock")
	waitListening(t, socket)
	return socket, cmd
}

// waitListening polls for the socket, which appears when it listens.
func waitListening(t *testing.T, socket string) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for time.Now().Before(deadline) {
		if _, err := os.Lstat(socket); err == nil {
			return
		}
		syscall.Nanosleep(&syscall.Timespec{Nsec: 1e6}, nil)
	}
	t.Fatal("the launcher does not listen")
}

func self(t *testing.T) string {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func textFile(t *testing.T, text string) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if _, err := f.WriteString(text); err != nil {
		t.Fatal(err)
	}
	return f
}

func TestProgramGetsExactlyItsArgumentsEnvironmentAndFiles(t *testing.T) {
	for _, files := range []int{3, 5, 12, MaxFiles} {
		t.Run(strconv.Itoa(files), func(t *testing.T) {
			socket, cmd := startLauncher(t)
			r, w, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer null.Close()
			list := []*os.File{null, w, w}
			want := programFacts{Texts: map[int]string{}, CoreMask: "00000000"}
			for i := range files {
				want.Open = append(want.Open, i)
				if i > 2 {
					want.Texts[i] = fmt.Sprintf("file %d", i)
					list = append(list, textFile(t, want.Texts[i]))
				}
			}
			want.Args = []string{self(t), "program", "a b", "", "ü"}
			want.Env = []string{"A=1", "B=x=y"}
			if err := Send(t.Context(), socket, want.Args, want.Env, list); err != nil {
				t.Fatal(err)
			}
			w.Close()
			data, err := io.ReadAll(r)
			if err != nil {
				t.Fatal(err)
			}
			var got programFacts
			if err := json.Unmarshal(data, &got); err != nil {
				t.Fatalf("%v in %q", err, data)
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("got  %+v\nwant %+v", got, want)
			}
			if err := cmd.Wait(); err != nil {
				t.Error(err)
			}
			if _, err := os.Lstat(socket); !os.IsNotExist(err) {
				t.Errorf("socket after the launch: %v", err)
			}
		})
	}
}

func TestSendReturnsTheLaunchersError(t *testing.T) {
	socket, cmd := startLauncher(t)
	err := Send(t.Context(), socket, []string{"/does/not/exist"}, nil, nil)
	if err == nil || !strings.Contains(err.Error(), "no such file or directory") {
		t.Fatalf("got %v", err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("the launcher must end after a launch that went wrong")
	}
}

func TestLauncherSurvivesBadMessages(t *testing.T) {
	socket, _ := startLauncher(t)
	for _, text := range []string{"", "x", `{"args":["rel"]}`, `{"args":["/x"],"fds":[3]}`, strings.Repeat("x", MaxMessage+1)} {
		conn, err := dial(t.Context(), socket)
		if err != nil {
			t.Fatal(err)
		}
		if err := sendPacket(conn, []byte(text), nil); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 200)
		n, err := conn.Read(buf)
		if err != nil || string(buf[:n]) == ackExec {
			t.Errorf("%.20q: answer %q, %v", text, buf[:n], err)
		}
		conn.Close()
	}
	if err := Send(t.Context(), socket, []string{"/bin/true"}, nil, nil); err != nil {
		t.Fatal(err)
	}
}

func TestOnlyRootCommandsTheLauncher(t *testing.T) {
	for _, uid := range []int{65534, 1000} {
		socket, _ := startLauncher(t)
		open(t, socket)
		got := make(chan string)
		go func() { got <- commandAs(uid, socket) }()
		if text, want := <-got, fmt.Sprintf("user %d may not command the launcher", uid); text != want {
			t.Errorf("got %q, want %q", text, want)
		}
	}
}

// commandAs changes the user of its thread, which must end with its goroutine: the
// caller gives it one of its own.
func commandAs(uid int, socket string) string {
	runtime.LockOSThread()
	conn, err := dial(context.Background(), socket)
	if err == nil {
		conn.Close() // reachable at all
		_, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid))
		if errno != 0 {
			return errno.Error()
		}
		conn, err = dial(context.Background(), socket)
	}
	if err != nil {
		return err.Error()
	}
	defer conn.Close()
	if err := sendPacket(conn, []byte(`{"args":["/bin/true"]}`), nil); err != nil {
		return err.Error()
	}
	buf := make([]byte, 200)
	n, err := conn.Read(buf)
	if errors.Is(err, unix.ECONNRESET) { // it did not read what it refuses
		n, err = conn.Read(buf)
	}
	if err != nil {
		return err.Error()
	}
	return string(buf[:n])
}

// open lets any user reach the socket.
func open(t *testing.T, socket string) {
	t.Helper()
	for _, path := range []string{socket, filepath.Dir(socket), filepath.Dir(filepath.Dir(socket)), filepath.Dir(filepath.Dir(filepath.Dir(socket)))} {
		if err := os.Chmod(path, 0o777); err != nil {
			t.Fatal(err)
		}
	}
}

func TestSendHonoursItsContext(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	err = Send(ctx, socket, []string{"/bin/true"}, nil, nil)
	if err == nil || ctx.Err() == nil {
		t.Fatalf("got %v", err)
	}
}

func TestSendNoticesALauncherThatDies(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		c, err := l.Accept()
		if err == nil {
			c.Close()
		}
		l.Close()
	}()
	if err := Send(t.Context(), socket, []string{"/bin/true"}, nil, nil); err == nil {
		t.Fatal("success without an execve")
	}
}

func TestSendRefusesWhatTheLauncherWould(t *testing.T) {
	many := make([]*os.File, MaxFiles+1)
	for i := range many {
		many[i] = os.Stdin
	}
	for name, m := range map[string]struct {
		args, env []string
		files     []*os.File
	}{
		"no args":        {},
		"relative":       {args: []string{"x"}},
		"NUL":            {args: []string{"/x", "a\x00b"}},
		"bad env":        {args: []string{"/x"}, env: []string{"=x"}},
		"too many files": {args: []string{"/x"}, files: many},
		"too long":       {args: []string{"/x", strings.Repeat("x", MaxMessage)}},
	} {
		if err := Send(t.Context(), "/nowhere/s", m.args, m.env, m.files); err == nil || strings.Contains(err.Error(), "nowhere") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"args":["/bin/true","x"],"env":["A=1"],"fds":[0,1,5]}`), 3)
	f.Add([]byte(`{"args":["/x"],"fds":[99]}`), 1)
	f.Add([]byte(`{"args":["/x"]}{}`), 0)
	f.Fuzz(func(t *testing.T, data []byte, files int) {
		m, err := Decode(data, files)
		if err != nil {
			return
		}
		again, err := m.encode()
		if err != nil {
			if len(data) < MaxMessage/6 { // escaping can make it longer
				t.Fatalf("accepted a message that cannot be sent: %v", err)
			}
			return
		}
		if m2, err := Decode(again, files); err != nil || len(m2.Args) != len(m.Args) {
			t.Fatalf("round trip: %+v, %v", m2, err)
		}
	})
}
