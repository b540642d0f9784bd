package runc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cubelet/internal/vmm"
)

// identify returns the identity of a living process.
func identify(pid int) (vmm.Process, error) {
	state, start, err := readStat(pid)
	if err != nil {
		return vmm.Process{}, err
	}
	if dead(state) {
		return vmm.Process{}, fmt.Errorf("process %d is dead", pid)
	}
	return vmm.Process{PID: pid, StartTime: start}, nil
}

// alive reports whether exactly this process still runs. A zombie does not.
func alive(p vmm.Process) bool {
	if p.PID <= 0 {
		return false
	}
	state, start, err := readStat(p.PID)
	return err == nil && start == p.StartTime && !dead(state)
}

func dead(state byte) bool { return state == 'Z' || state == 'X' || state == 'x' }

// readStat returns fields 3 and 22 of /proc/PID/stat. The name before them can hold
// spaces and brackets, so the fields are counted from its last bracket.
func readStat(pid int) (state byte, start uint64, err error) {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, 0, err
	}
	fields := bytes.Fields(data[bytes.LastIndexByte(data, ')')+1:])
	if len(fields) < 20 {
		return 0, 0, fmt.Errorf("stat of process %d has %d fields", pid, len(fields))
	}
	start, err = strconv.ParseUint(string(fields[19]), 10, 64)
	if err != nil {
		return 0, 0, fmt.Errorf("start time of process %d: %w", pid, err)
	}
	return fields[0][0], start, nil
}

// openProcess returns a pidfd of exactly this process, or nil when it is gone.
func openProcess(p vmm.Process) (*os.File, error) {
	if p.PID <= 0 {
		return nil, nil
	}
	fd, err := unix.PidfdOpen(p.PID, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", p.PID, err)
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	// Only now can the number not be reused: is it still the one that was meant?
	if !alive(p) {
		f.Close()
		return nil, nil
	}
	return f, nil
}

// killProcess sends SIGKILL to exactly this process. Gone already is success.
func killProcess(p vmm.Process) error {
	f, err := openProcess(p)
	if f == nil {
		return err
	}
	defer f.Close()
	err = unix.PidfdSendSignal(int(f.Fd()), unix.SIGKILL, nil, 0)
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill process %d: %w", p.PID, err)
	}
	return nil
}

// waitGone returns when the process has ended, or when ctx has.
func waitGone(ctx context.Context, p vmm.Process) error {
	f, err := openProcess(p)
	if f == nil {
		return err
	}
	defer f.Close()
	stop := context.AfterFunc(ctx, func() { _ = f.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	raw, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("watch process %d: %w", p.PID, err)
	}
	err = raw.Read(func(fd uintptr) bool { return ended(int(fd)) })
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	}
	return fmt.Errorf("watch process %d: %w", p.PID, err)
}

// ended reports whether a pidfd is readable, which it is from the process's end on.
func ended(pidfd int) bool {
	fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n > 0
}
