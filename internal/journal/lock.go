package journal

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/durable"
)

// acquireLock takes the journal's lock file, which names its holder. The lock ends with
// the process, however it ends. It is a file of its own so that a broken database can be
// replaced under it.
func acquireLock(path string, timeout time.Duration) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open journal lock: %w", err)
	}
	if err := durable.Flock(context.Background(), file, timeout); err != nil {
		return nil, errors.Join(lockError(path, err), file.Close())
	}
	pid := []byte(strconv.Itoa(os.Getpid()) + "\n")
	if err := errors.Join(file.Truncate(0), writeAt(file, pid)); err != nil && !errors.Is(err, unix.ENOSPC) {
		return nil, errors.Join(fmt.Errorf("write journal lock: %w", err), file.Close())
	}
	return file, nil
}

func writeAt(file *os.File, b []byte) error {
	_, err := file.WriteAt(b, 0)
	return err
}

func lockError(path string, err error) error {
	if !errors.Is(err, durable.ErrLocked) {
		return fmt.Errorf("open journal: %w", err)
	}
	holder := "another process"
	if b, readErr := os.ReadFile(path); readErr == nil && len(b) > 0 {
		holder = "process " + strings.TrimSpace(string(b))
	}
	return cube.Errorf(cube.CodeFailedPrecondition, "the journal is in use by %s", holder).
		WithHint("Only one Cubelet can run on one root directory; stop the other one first.")
}
