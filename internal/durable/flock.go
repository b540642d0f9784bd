package durable

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// ErrLocked means that another process kept a lock for as long as we waited.
var ErrLocked = errors.New("locked by another process")

const flockPoll = 20 * time.Millisecond

// Flock takes the exclusive lock on an open file, for at most wait. The lock ends when the
// file is closed, and with the process however it ends. The error is ErrLocked when
// another process holds it, the context's when that ends first.
func Flock(ctx context.Context, f *os.File, wait time.Duration) error {
	ctx, cancel := context.WithTimeoutCause(ctx, wait, ErrLocked)
	defer cancel()
	retry := time.NewTicker(flockPoll)
	defer retry.Stop()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR):
			return fmt.Errorf("lock %s: %w", f.Name(), err)
		}
		select {
		case <-retry.C:
		case <-ctx.Done():
			return fmt.Errorf("lock %s: %w", f.Name(), context.Cause(ctx))
		}
	}
}
