// Command probe runs inside a slot and tells what it can do there. It writes one JSON
// object to descriptor 1 and then obeys its first argument: "report" ends, "wait"
// blocks until it is killed, "exit" ends with code 7, "eat" uses memory without end.
package main

import (
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"sort"
	"strings"

	"golang.org/x/sys/unix"
)

// Report is what the tests look at. Attempts maps an attempt to its error, "" meaning
// that it succeeded.
type Report struct {
	Args, Env  []string
	Status     map[string]string
	PID, UID   int
	Interfaces []string
	Root       []string
	Attempts   map[string]string
	CoreLimit  uint64
	FileLimit  uint64
	CoreFilter string
	Fd4        string
}

func main() {
	data, err := json.Marshal(report())
	if err != nil {
		os.Exit(3)
	}
	_, _ = unix.Write(1, append(data, '\n'))
	_ = unix.Close(1)
	switch os.Args[1] {
	case "wait":
		for {
			_, _ = unix.Poll(nil, -1)
		}
	case "exit":
		os.Exit(7)
	case "eat":
		var all [][]byte
		for {
			b := make([]byte, 1<<20)
			for i := 0; i < len(b); i += 4096 {
				b[i] = 1
			}
			all = append(all, b)
			_ = all
		}
	}
}

func report() Report {
	r := Report{Args: os.Args, Env: os.Environ(), PID: os.Getpid(), UID: os.Getuid(), Status: status(), Attempts: attempts()}
	ifs, err := net.Interfaces()
	for _, i := range ifs {
		r.Interfaces = append(r.Interfaces, i.Name)
	}
	if err != nil {
		r.Interfaces = []string{"unknown: " + err.Error()}
		names, _ := os.ReadFile("/proc/net/dev")
		for _, line := range strings.Split(string(names), "\n") {
			if name, _, ok := strings.Cut(line, ":"); ok {
				r.Interfaces = append(r.Interfaces, strings.TrimSpace(name))
			}
		}
		r.Interfaces = r.Interfaces[1:]
	}
	entries, _ := os.ReadDir("/")
	for _, e := range entries {
		r.Root = append(r.Root, e.Name())
	}
	sort.Strings(r.Root)
	var l unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_CORE, &l)
	r.CoreLimit = l.Max
	_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &l)
	r.FileLimit = l.Max
	f, _ := os.ReadFile("/proc/self/coredump_filter")
	r.CoreFilter = strings.TrimSpace(string(f))
	buf := make([]byte, 100)
	if n, err := unix.Pread(4, buf, 0); err == nil {
		r.Fd4 = string(buf[:n])
	}
	return r
}

func status() map[string]string {
	m := make(map[string]string)
	data, _ := os.ReadFile("/proc/self/status")
	for _, line := range strings.Split(string(data), "\n") {
		if k, v, ok := strings.Cut(line, ":"); ok {
			m[k] = strings.TrimSpace(v)
		}
	}
	return m
}

func attempts() map[string]string {
	text := func(err error) string {
		if err == nil {
			return ""
		}
		return err.Error()
	}
	m := make(map[string]string)
	for _, d := range []string{"/", "/usr", "/usr/bin", "/lib", "/proc", "/proc/sys/kernel"} {
		f, err := os.Create(filepath.Join(d, "x"))
		if err == nil {
			f.Close()
		}
		m["create in "+d] = text(err)
	}
	f, err := os.Create("/run/cube/x")
	if err == nil {
		f.Close()
		_ = os.Remove("/run/cube/x")
	}
	m["create in /run/cube"] = text(err)
	for _, p := range []string{"/etc/passwd", "/root", "/var", "/home", "/sys", "/dev/kvm", "/dev/net/tun", "/dev/vda"} {
		_, err := os.Stat(p)
		m["stat "+p] = text(err)
	}
	m["mount"] = text(unix.Mount("tmpfs", "/tmp", "tmpfs", 0, ""))
	m["unshare"] = text(unix.Unshare(unix.CLONE_NEWUSER))
	m["ptrace"] = text(unix.PtraceAttach(1))
	m["chroot"] = text(unix.Chroot("/tmp"))
	for name, s := range map[string][3]int{
		"netlink": {unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE},
		"packet":  {unix.AF_PACKET, unix.SOCK_RAW, 0},
		"inet":    {unix.AF_INET, unix.SOCK_STREAM, 0},
		"vsock":   {unix.AF_VSOCK, unix.SOCK_STREAM, 0},
		"unix":    {unix.AF_UNIX, unix.SOCK_STREAM, 0},
	} {
		_, err := unix.Socket(s[0], s[1], s[2])
		m["socket "+name] = text(err)
	}
	_, _, errno := unix.RawSyscall(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0)
	m["fork"] = ""
	if errno != 0 {
		m["fork"] = errno.Error()
	}
	_, err = unix.MemfdCreate("x", 0)
	m["memfd"] = text(err)
	m["setuid"] = text(unix.Setuid(0))
	_, err = unix.PerfEventOpen(&unix.PerfEventAttr{}, 0, -1, -1, 0)
	m["perf"] = text(err)
	return m
}
