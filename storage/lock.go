package storage

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
)

const lockWait = 2 * time.Second

// flockWithin locks the file, waiting a little for a process that goes away.
func flockWithin(f *os.File, wait time.Duration, cancelled <-chan struct{}) error {
	deadline := time.NewTimer(wait)
	defer deadline.Stop()
	retry := time.NewTicker(20 * time.Millisecond)
	defer retry.Stop()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return err
		}
		select {
		case <-retry.C:
		case <-deadline.C:
			return err
		case <-cancelled:
			return err
		}
	}
}

// acquireLock keeps other processes from opening the same pool. The lock ends with the
// process, however it ends.
func (p *Pool) acquireLock(ctx context.Context) (err error) {
	fd, err := unix.Openat(int(p.root.Fd()), lockName, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return &os.PathError{Op: "open", Path: lockName, Err: err}
	}
	p.lock = os.NewFile(uintptr(fd), lockName)
	err = flockWithin(p.lock, lockWait, ctx.Done())
	if errors.Is(err, unix.EWOULDBLOCK) {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return cube.Errorf(cube.CodeFailedPrecondition, "the pool is in use by another process").
			WithHint("Only one Cubelet can run on one root directory; stop the other one first.")
	}
	return err
}
