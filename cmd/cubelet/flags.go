package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/daemon"
)

// nodeFlags are the flags that every command on a node shares.
type nodeFlags struct {
	cfg        daemon.Config
	poolSize   string
	hostPrefix string
	logLevel   slog.Level
}

func (f *nodeFlags) bind(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVar(&f.cfg.Root, "root", daemon.DefaultRoot, "directory of everything that belongs to the node")
	fl.StringVar(&f.cfg.KernelDir, "kernel-dir", "", "guest kernel: vmlinuz, release, modules/ (default ROOT/kernel)")
	fl.StringVar(&f.cfg.LibexecDir, "libexec", "", "directory of cube-agent, vmm-launcher and the shim (default: that of cubelet)")
	fl.StringVar(&f.cfg.QEMU, "qemu", "", "QEMU binary (default qemu-system-x86_64)")
	fl.StringVar(&f.cfg.Runc, "runc", "", "runc binary (default runc)")
	fl.StringVar(&f.cfg.Accel, "accel", "auto", "accelerator: auto, kvm or tcg")
	fl.StringVar(&f.poolSize, "pool-size", "20GiB", "size of the pool's sparse image, when it is made")
	fl.StringVar(&f.hostPrefix, "host-prefix", "", "IPv4 prefix for the host side of sandbox networks (default: a free one)")
	fl.TextVar(&f.logLevel, "log-level", slog.LevelInfo, "DEBUG, INFO, WARN or ERROR")
}

// config returns the checked configuration.
func (f *nodeFlags) config() (daemon.Config, error) {
	c := f.cfg
	c.Version = buildVersion()
	c.Log = newLogger(f.logLevel)
	size, err := parseSize(f.poolSize)
	if err != nil {
		return c, cube.InvalidField("--pool-size", "%w", err)
	}
	c.PoolBytes = size
	if f.hostPrefix != "" {
		if c.HostPrefix, err = netip.ParsePrefix(f.hostPrefix); err != nil {
			return c, cube.InvalidField("--host-prefix", "%w", err)
		}
	}
	return c, c.Validate()
}

// parseSize reads "512MiB", "20GiB", "20G" or a number of bytes.
func parseSize(s string) (int64, error) {
	units := []struct {
		suffix string
		shift  uint
	}{{"TiB", 40}, {"GiB", 30}, {"MiB", 20}, {"KiB", 10}, {"T", 40}, {"G", 30}, {"M", 20}, {"K", 10}}
	num, shift := s, uint(0)
	for _, u := range units {
		if n, ok := strings.CutSuffix(s, u.suffix); ok {
			num, shift = n, u.shift
			break
		}
	}
	n, err := strconv.ParseInt(strings.TrimSpace(num), 10, 64)
	if err != nil || n <= 0 || n > (1<<62)>>shift {
		return 0, fmt.Errorf("%q is not a size such as 20GiB", s)
	}
	return n << shift, nil
}

func hintOf(err error) string {
	var e *cube.Error
	if errors.As(err, &e) {
		return e.Hint
	}
	return ""
}
