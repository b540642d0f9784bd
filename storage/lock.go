package storage

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/durable"
)

// lockWait bounds the wait for a daemon that is going away.
const lockWait = 2 * time.Second

// acquireLock keeps other processes from opening the same pool.
func (p *Pool) acquireLock(ctx context.Context) error {
	fd, err := unix.Openat(int(p.root.Fd()), lockName, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return &os.PathError{Op: "open", Path: lockName, Err: err}
	}
	p.lock = os.NewFile(uintptr(fd), lockName)
	err = durable.Flock(ctx, p.lock, lockWait)
	if errors.Is(err, durable.ErrLocked) {
		return cube.Errorf(cube.CodeFailedPrecondition, "the pool is in use by another process").
			WithHint("Only one Cubelet can run on one root directory; stop the other one first.")
	}
	return err
}
