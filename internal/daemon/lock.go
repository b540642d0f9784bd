package daemon

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	cube "github.com/cubesandbox/cubelet"
)

// lockRoot makes this process the node's only daemon. The file holds its PID and is
// locked as long as it lives, so a PID that is left behind means nothing. The caller
// closes the file.
func lockRoot(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		pid, _ := os.ReadFile(path) // only for the message
		f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, cube.Errorf(cube.CodeFailedPrecondition, "another cubelet, process %s, runs on %s",
				strings.TrimSpace(string(pid)), filepath.Dir(path)).WithHint("stop it first, or use another --root")
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	if err := f.Truncate(0); err != nil {
		f.Close()
		return nil, fmt.Errorf("write lock: %w", err)
	}
	if _, err := fmt.Fprintf(f, "%d\n", os.Getpid()); err != nil {
		f.Close()
		return nil, fmt.Errorf("write lock: %w", err)
	}
	return f, nil
}

// clearEarlierBoot removes what only meant something while the host's last boot
// lasted: sockets, owner files, pins of namespaces.
func clearEarlierBoot(l layout) error {
	const source = "/proc/sys/kernel/random/boot_id"
	now, err := os.ReadFile(source)
	if err != nil {
		return fmt.Errorf("boot ID: %w", err)
	}
	if then, err := os.ReadFile(l.boot); err == nil && string(then) == string(now) {
		return nil
	}
	for _, dir := range []string{l.vmm, l.qemu, l.net, l.runcRoot, l.shims, l.state} {
		if err := os.RemoveAll(dir); err != nil {
			return fmt.Errorf("clear what an earlier boot left: %w", err)
		}
	}
	if err := os.WriteFile(l.boot, now, 0o600); err != nil {
		return fmt.Errorf("remember the boot: %w", err)
	}
	return nil
}
