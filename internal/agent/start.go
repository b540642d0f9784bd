package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"github.com/creack/pty"
	"golang.org/x/sys/unix"
)

// startSpec is a program to run.
type startSpec struct {
	cmd     string // empty: the image's entrypoint and command
	args    []string
	envs    map[string]string
	cwd     *string
	tag     *string
	stdin   bool
	pty     *ptySize
	user    string    // empty: the default user
	expires time.Time // zero: never
}

type ptySize struct{ cols, rows uint32 }

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// start runs the program and returns it with a subscription that misses no output.
// Errors are connect errors.
func (s *Server) start(spec startSpec) (*process, *subscriber, error) {
	who, err := s.user(spec.user)
	if err != nil {
		return nil, nil, err
	}
	argv, err := s.argv(spec)
	if err != nil {
		return nil, nil, err
	}
	dir, err := s.workdir(spec, who)
	if err != nil {
		return nil, nil, err
	}
	env := s.environment(spec, who)
	path, err := lookPath(argv[0], dir, envValue(env, "PATH"))
	if err != nil {
		return nil, nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	p := &process{spec: spec, agent: s, cgroup: s.cgroups.take()}
	p.hub.init()
	sub := p.hub.subscribe()
	if err := p.fork(path, argv, &syscall.ProcAttr{Dir: dir, Env: env, Sys: s.sysAttr(p, who)}, who); err != nil {
		s.cgroups.release(p.cgroup)
		return nil, nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("start %s: %w", argv[0], err))
	}
	return p, sub, nil
}

func (s *Server) argv(spec startSpec) ([]string, error) {
	if spec.cmd != "" {
		return append([]string{spec.cmd}, spec.args...), nil
	}
	argv := s.identity().imageArgs()
	if len(argv) == 0 {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("no command given and the image has none"))
	}
	return append(argv, spec.args...), nil
}

func (s *Server) sysAttr(p *process, who *user) *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setsid: true}
	if who.uid != uint32(os.Getuid()) || who.gid != uint32(os.Getgid()) || s.cfg.PID1 {
		attr.Credential = &syscall.Credential{Uid: who.uid, Gid: who.gid, Groups: who.groups}
	}
	if p.cgroup != nil {
		attr.UseCgroupFD, attr.CgroupFD = true, p.cgroup.fd
	}
	return attr
}

// workdir returns the directory to start in: the request's, the sandbox's, else the
// user's home, else the root directory.
func (s *Server) workdir(spec startSpec, who *user) (string, error) {
	base := s.identity().workdir
	if base == "" {
		base = who.home
		if !isDir(base) {
			base = "/"
		}
	}
	dir := base
	if spec.cwd != nil && *spec.cwd != "" {
		dir = expand(*spec.cwd, base, who)
	}
	if !isDir(dir) {
		return "", connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("cwd '%s' does not exist", dir))
	}
	return dir, nil
}

func isDir(path string) bool {
	var st syscall.Stat_t
	return syscall.Stat(path, &st) == nil && st.Mode&syscall.S_IFMT == syscall.S_IFDIR
}

// expand makes a path absolute: ~ is the user's home, and a relative path starts at base.
func expand(path, base string, who *user) string {
	switch {
	case path == "~":
		path = who.home
	case strings.HasPrefix(path, "~/"):
		path = filepath.Join(who.home, path[2:])
	case !filepath.IsAbs(path):
		path = filepath.Join(base, path)
	}
	return filepath.Clean(path)
}

// environment builds the variables of a process; the request's win over the sandbox's,
// and those over the user's.
func (s *Server) environment(spec startSpec, who *user) []string {
	env := []string{"HOME=" + who.home, "USER=" + who.name, "LOGNAME=" + who.name}
	if who.shell != "" {
		env = append(env, "SHELL="+who.shell)
	}
	if spec.pty != nil {
		env = append(env, "TERM=xterm-256color")
	}
	id := s.identity()
	env = setAll(env, id.env)
	env = setAll(env, spec.envs)
	if envValue(env, "PATH") == "" {
		env = append(env, "PATH="+defaultPath)
	}
	return env
}

func setAll(env []string, vars map[string]string) []string {
next:
	for k, v := range vars {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.Contains(v, "\x00") {
			continue
		}
		for i, kv := range env {
			if strings.HasPrefix(kv, k) && kv[len(k)] == '=' {
				env[i] = k + "=" + v
				continue next
			}
		}
		env = append(env, k+"="+v)
	}
	return env
}

func envValue(env []string, key string) string {
	for _, kv := range env {
		if strings.HasPrefix(kv, key) && kv[len(key)] == '=' {
			return kv[len(key)+1:]
		}
	}
	return ""
}

// lookPath finds the program as a shell would that runs in dir with that PATH.
func lookPath(name, dir, path string) (string, error) {
	if strings.Contains(name, "/") {
		if !filepath.IsAbs(name) {
			name = filepath.Join(dir, name)
		}
		if err := executable(name); err != nil {
			return "", fmt.Errorf("start %s: %w", name, err)
		}
		return name, nil
	}
	for d := range strings.SplitSeq(path, ":") {
		if !filepath.IsAbs(d) {
			d = filepath.Join(dir, d)
		}
		full := d + "/" + name
		if executable(full) == nil {
			return full, nil
		}
	}
	return "", fmt.Errorf("start %s: executable file not found in $PATH", name)
}

func executable(path string) error {
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil {
		return err
	}
	switch {
	case st.Mode&syscall.S_IFMT == syscall.S_IFDIR:
		return syscall.EISDIR
	case st.Mode&0o111 == 0:
		return syscall.EACCES
	}
	return nil
}

// fds collects the descriptors of a start: those of the child, closed in any case, and
// those of the agent, closed when the start fails.
type fds struct {
	child  []int
	parent []*os.File
}

func (f *fds) closeChild() {
	for _, fd := range f.child {
		syscall.Close(fd)
	}
}

func (f *fds) fail() {
	for _, p := range f.parent {
		p.Close()
	}
}

// pipe makes a pipe whose one end is for the child and whose other end, which does not
// block, is the agent's.
func (f *fds) pipe(childReads bool) (child int, mine *os.File, err error) {
	var p [2]int
	if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
		return 0, nil, os.NewSyscallError("pipe2", err)
	}
	child, other := p[1], p[0]
	if childReads {
		child, other = p[0], p[1]
	}
	f.child = append(f.child, child)
	if err := syscall.SetNonblock(other, true); err != nil {
		syscall.Close(other)
		return 0, nil, err
	}
	mine = os.NewFile(uintptr(other), "pipe")
	f.parent = append(f.parent, mine)
	return child, mine, nil
}

// fork starts the program of p; its outputs are being read when fork returns.
func (p *process) fork(path string, argv []string, attr *syscall.ProcAttr, who *user) error {
	var f fds
	defer f.closeChild()
	var err error
	if p.spec.pty != nil {
		err = p.openPTY(&f, attr, who)
	} else {
		err = p.openPipes(&f, attr)
	}
	if err != nil {
		f.fail()
		return err
	}
	p.pending.Store(int32(len(p.outputs)) + 1)
	started := make(chan struct{})
	pid, err := p.agent.reaper.start(func() (int, error) {
		return syscall.ForkExec(path, argv, attr)
	}, func(ws syscall.WaitStatus) {
		<-started
		p.onExit(ws)
	})
	if err != nil {
		f.fail()
		return err
	}
	p.pid = pid
	p.agent.procs.add(p)
	if !p.spec.expires.IsZero() {
		p.timer = time.AfterFunc(time.Until(p.spec.expires), func() { _ = p.kill(reasonDeadline) })
	}
	close(started)
	p.startPumps()
	return nil
}

// reasonDeadline is the error of an end event of a process that ran out of time.
const reasonDeadline = "deadline exceeded"

func (p *process) startPumps() {
	if p.spec.pty != nil {
		go p.pump(streamPTY, p.tty)
		return
	}
	go p.pump(streamStdout, p.outputs[0])
	go p.pump(streamStderr, p.outputs[1])
}

func (p *process) openPipes(f *fds, attr *syscall.ProcAttr) error {
	in := p.agent.devNull
	var err error
	if p.spec.stdin {
		if in, p.stdin, err = f.pipe(true); err != nil {
			return err
		}
	}
	outFD, out, err := f.pipe(false)
	if err != nil {
		return err
	}
	errFD, errOut, err := f.pipe(false)
	if err != nil {
		return err
	}
	p.outputs = []*os.File{out, errOut}
	attr.Files = []uintptr{uintptr(in), uintptr(outFD), uintptr(errFD)}
	return nil
}

func (p *process) openPTY(f *fds, attr *syscall.ProcAttr, who *user) error {
	master, slave, err := pty.Open()
	if err != nil {
		return err
	}
	f.parent = append(f.parent, master)
	fd, err := unix.FcntlInt(slave.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	slave.Close()
	if err != nil {
		return err
	}
	f.child = append(f.child, fd)
	// The Go runtime made it non-blocking, which programs do not expect of a terminal.
	if err := syscall.SetNonblock(fd, false); err != nil {
		return err
	}
	_ = syscall.Fchown(fd, int(who.uid), -1)
	if err := setSize(fd, p.spec.pty.cols, p.spec.pty.rows); err != nil {
		return err
	}
	p.tty = master
	p.outputs = []*os.File{master}
	attr.Files = []uintptr{uintptr(fd), uintptr(fd), uintptr(fd)}
	attr.Sys.Setctty, attr.Sys.Ctty = true, 0
	return nil
}
