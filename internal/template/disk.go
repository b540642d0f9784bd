package template

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/durable"
)

// makeLayer makes the file system that sandboxes write to. It has a journal: a sandbox
// may be killed at any moment and go on from its layer later, and no guest has an fsck.
// The journal is small, for each sandbox pays for what it writes of it. The file is new
// and all zeros, so the inode tables need no initialisation: neither now nor by a kernel
// thread in every clone.
func makeLayer(ctx context.Context, path string, mib int) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("make writable layer: %w", errors.Join(err, removeIfThere(path)))
		}
	}()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Truncate(int64(mib)<<20), f.Close()); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "mkfs.ext4", "-q", "-F", "-b", "4096", "-I", "256", "-m", "0", "-L", "layer",
		"-J", fmt.Sprintf("size=%d", journalMiB(mib)),
		"-E", "assume_storage_prezeroed=1,nodiscard,root_owner=0:0", path)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return mkfsError(ctx, err, out.String())
	}
	if err := os.Chmod(path, 0o444); err != nil {
		return err
	}
	return durable.SyncFile(path)
}

func journalMiB(mib int) int {
	if mib < 256 {
		return 4
	}
	return 8
}

func mkfsError(ctx context.Context, err error, out string) error {
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, exec.ErrNotFound):
		return cube.Errorf(cube.CodeFailedPrecondition, "%w", err).WithHint("install e2fsprogs 1.47 or newer on the node")
	case strings.Contains(out, syscall.ENOSPC.Error()):
		return cube.Errorf(cube.CodeNoSpace, "%w: %s", err, strings.TrimSpace(out))
	}
	return fmt.Errorf("mkfs.ext4: %w: %s", err, strings.TrimSpace(out))
}

func removeIfThere(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
