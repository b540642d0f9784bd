package qemu

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/launch"
	"github.com/cubesandbox/cubelet/internal/testenv"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// firstUID is the user of the first VMM of a test.
const firstUID = 64100

// testJail runs launchers as users of their own, without a container around them.
type testJail struct {
	dir      string
	launcher string

	mu    sync.Mutex
	slots map[string]*testSlot
	uid   int
}

type testSlot struct {
	inst   vmm.Instance
	socket string
	cmd    *exec.Cmd
	done   chan struct{}
}

func newTestJail(t testing.TB, dir string) *testJail {
	t.Helper()
	j := &testJail{dir: dir, launcher: testenv.Binary(t, "vmm-launcher"), slots: map[string]*testSlot{}, uid: firstUID}
	t.Cleanup(func() {
		for owner := range j.slots {
			if err := j.Destroy(context.Background(), owner); err != nil {
				t.Error(err)
			}
		}
	})
	return j
}

func (j *testJail) Claim(ctx context.Context, owner string, _ vmm.Limits) (vmm.Instance, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.slots[owner] != nil {
		return vmm.Instance{}, cube.Errorf(cube.CodeAlreadyExists, "%s has a slot", owner)
	}
	uid := j.uid
	j.uid++
	dir := filepath.Join(j.dir, "slot-"+strconv.Itoa(uid))
	if err := os.Mkdir(dir, 0o700); err != nil {
		return vmm.Instance{}, err
	}
	if err := os.Chown(dir, uid, uid); err != nil {
		return vmm.Instance{}, err
	}
	s := &testSlot{socket: filepath.Join(dir, "l"), done: make(chan struct{})}
	s.cmd = exec.Command(j.launcher, s.socket)
	s.cmd.Stderr = os.Stderr
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}, Pdeathsig: syscall.SIGKILL}
	if err := s.cmd.Start(); err != nil {
		return vmm.Instance{}, err
	}
	go func() {
		_ = s.cmd.Wait()
		close(s.done)
	}()
	start, err := startTime(s.cmd.Process.Pid)
	if err != nil {
		return vmm.Instance{}, err
	}
	s.inst = vmm.Instance{Owner: owner, Slot: filepath.Base(dir), UID: uid, Process: vmm.Process{PID: s.cmd.Process.Pid, StartTime: start}}
	j.slots[owner] = s
	return s.inst, s.listening(ctx)
}

func (s *testSlot) listening(ctx context.Context) error {
	for {
		if _, err := os.Stat(s.socket); err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-s.done:
			return fmt.Errorf("launcher of %s ended", s.inst.Owner)
		case <-time.After(time.Millisecond):
		}
	}
}

func startTime(pid int) (uint64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	return strconv.ParseUint(fields[19], 10, 64)
}

func (j *testJail) slot(owner string) (*testSlot, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if s := j.slots[owner]; s != nil {
		return s, nil
	}
	return nil, cube.Errorf(cube.CodeNotFound, "%s has no slot", owner)
}

func (j *testJail) Launch(ctx context.Context, owner string, args, env []string, files []*os.File) error {
	s, err := j.slot(owner)
	if err != nil {
		return err
	}
	return launch.Send(ctx, s.socket, args, env, files)
}

func (j *testJail) Destroy(_ context.Context, owner string) error {
	s, err := j.slot(owner)
	if cube.IsNotFound(err) {
		return nil
	}
	_ = s.cmd.Process.Kill()
	<-s.done
	j.mu.Lock()
	delete(j.slots, owner)
	j.mu.Unlock()
	return os.RemoveAll(filepath.Dir(s.socket))
}

func (j *testJail) List(context.Context) ([]vmm.Instance, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	var all []vmm.Instance
	for _, s := range j.slots {
		all = append(all, s.inst)
	}
	return all, nil
}

func (j *testJail) Wait(ctx context.Context, owner string) (vmm.Exit, error) {
	s, err := j.slot(owner)
	if err != nil {
		return vmm.Exit{}, err
	}
	select {
	case <-ctx.Done():
		return vmm.Exit{}, ctx.Err()
	case <-s.done:
		status := s.cmd.ProcessState.Sys().(syscall.WaitStatus)
		code := status.ExitStatus()
		if status.Signaled() {
			code = 128 + int(status.Signal())
		}
		return vmm.Exit{Owner: owner, Code: code, Time: time.Now()}, nil
	}
}
