// Package boot is what the guest agent does because it is PID 1: it mounts the file
// systems, loads modules, sets up the network and powers the machine off.
package boot

import (
	"fmt"
	"log/slog"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// CgroupDir is where the agent puts the control groups of the programs it runs.
const CgroupDir = "/sys/fs/cgroup/user"

// Run brings the machine from the kernel's first process in the initramfs to a running
// system in the image's root file system. It must be called once, as PID 1.
func Run(log *slog.Logger) (*Machine, error) {
	syscall.Umask(0o022)
	if err := mountAll("/", earlyMounts()); err != nil {
		return nil, err
	}
	line, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return nil, err
	}
	opts := ParseCmdline(string(line))
	loadModules(log, "/modules")
	layer, err := switchRoot(opts)
	if err != nil {
		return nil, err
	}
	m := &Machine{log: log, layer: layer}
	if err := mountAll("/", lateMounts()); err != nil {
		return nil, err
	}
	if err := ensureTmp(); err != nil {
		log.Warn("make /tmp", "err", err)
	}
	deviceLinks()
	tune(log)
	if err := setUpCgroups(); err != nil {
		log.Warn("control groups", "err", err)
	}
	if err := setUp("lo"); err != nil {
		log.Warn("set up lo", "err", err)
	}
	if opts.Address != "" {
		if err := setUpLink(opts.Address, opts.Gateway); err != nil {
			return nil, fmt.Errorf("network: %w", err)
		}
	}
	if m.files, err = mountIdentity(); err != nil {
		return nil, err
	}
	return m, nil
}

// tune sets limits and kernel parameters as container engines do.
func tune(log *slog.Logger) {
	const soft, hard = 65536, 1048576
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: soft, Max: hard}); err != nil {
		log.Warn("raise the limit of open files", "err", err)
	}
	// Any user may ping.
	_ = os.WriteFile("/proc/sys/net/ipv4/ping_group_range", []byte("0 2147483647"), 0)
}

// deviceLinks makes the links that devtmpfs does not have.
func deviceLinks() {
	for name, target := range map[string]string{
		"/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0",
		"/dev/stdout": "/proc/self/fd/1", "/dev/stderr": "/proc/self/fd/2",
	} {
		_ = os.Symlink(target, name)
	}
}

// Fail reports a boot that cannot go on, where the host looks for it, and powers off.
func Fail(err error) {
	fmt.Fprintf(os.Stderr, "cube-agent: boot: %v\n", err)
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}
