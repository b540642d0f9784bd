package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/doctor"
	"github.com/cubesandbox/cubelet/internal/initramfs"
	"github.com/cubesandbox/cubelet/internal/vmm/qemu"
	"github.com/cubesandbox/cubelet/networkagent"
	"github.com/cubesandbox/cubelet/storage"
)

// DoctorChecks lists the checks of the host for a node with this configuration.
func DoctorChecks(cfg Config) []doctor.Check {
	return doctor.Checks(doctor.Config{
		Root: cfg.Root, KernelDir: cfg.KernelDir, LibexecDir: cfg.LibexecDir, QEMU: cfg.QEMU, Runc: cfg.Runc,
		Boot:    func(ctx context.Context) (string, error) { return tryBoot(ctx, cfg) },
		Network: tryNetwork,
		Pool:    func(ctx context.Context) (string, error) { return tryPool(ctx, cfg) },
	})
}

// tryBoot boots a guest with nothing but the agent and waits for its first words.
func tryBoot(ctx context.Context, cfg Config) (string, error) {
	accel, reason, err := qemu.ProbeAccel(cfg.Accel)
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp("", "cubelet-doctor-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	release, err := os.ReadFile(filepath.Join(cfg.KernelDir, "release"))
	if err != nil {
		return "", err
	}
	initrd := filepath.Join(dir, "initrd.img")
	if err := initramfs.BuildFile(initrd, initramfs.Config{
		Agent:      filepath.Join(cfg.LibexecDir, "cube-agent"),
		ModulesDir: filepath.Join(cfg.KernelDir, "modules"), Release: strings.TrimSpace(string(release)),
	}); err != nil {
		return "", err
	}
	begin := time.Now()
	cmd := exec.CommandContext(ctx, cfg.QEMU, qemu.ProbeArgs(accel, filepath.Join(cfg.KernelDir, "vmlinuz"), initrd)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("guest under %s: %w\n%s", accel, err, tail(out))
	}
	// Without disks the agent says so and powers off: the kernel and a process ran.
	if !strings.Contains(string(out), "cube-agent:") {
		return "", fmt.Errorf("guest under %s ended before the agent spoke\n%s", accel, tail(out))
	}
	return fmt.Sprintf("a guest booted under %s in %v (%s)", accel, time.Since(begin).Round(10*time.Millisecond), reason), nil
}

func tail(b []byte) string {
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(lines[max(0, len(lines)-15):], "\n")
}

// tryNetwork looks for firewalls in the way, then makes a slot as a sandbox gets it, in
// a network namespace of a child process so that nothing of the host is changed.
func tryNetwork(ctx context.Context) (string, error) {
	obstacles, err := networkagent.Obstacles()
	if err != nil {
		return "", err
	}
	if len(obstacles) > 0 {
		return "", errors.New(strings.Join(obstacles, "; "))
	}
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	child := exec.CommandContext(ctx, self, "doctor", "--"+DoctorNetworkFlag)
	child.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS}
	if out, err := child.CombinedOutput(); err != nil {
		return "", fmt.Errorf("make a namespace with tap, veth and rules: %w\n%s", err, tail(out))
	}
	return "made a namespace with tap, veth and rules; no firewall of the host is in the way", nil
}

// DoctorNetworkFlag is the hidden flag of `cubelet doctor` for the child of tryNetwork.
const DoctorNetworkFlag = "try-network"

// TryNetworkInside makes a network slot and takes it away. The process is in network and
// mount namespaces of its own.
func TryNetworkInside(ctx context.Context) (err error) {
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("keep mounts from the host: %w", err)
	}
	dir, err := os.MkdirTemp("", "cubelet-doctor-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	agent, err := networkagent.New(networkagent.Config{RunDir: dir, Node: "doc"})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, agent.Close()) }()
	tap, err := agent.Claim(ctx, "doctor", cube.NetworkSpec{})
	if err != nil {
		return err
	}
	return errors.Join(tap.Close(), agent.Release(ctx, "doctor"))
}

// tryPool opens the pool, or makes a small one and takes it away again.
func tryPool(ctx context.Context, cfg Config) (string, error) {
	if _, err := os.Stat(cfg.layout().poolImage); err == nil {
		return "there is a pool: " + cfg.layout().poolImage, nil
	}
	dir, err := os.MkdirTemp("", "cubelet-doctor-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	const size = 512 << 20
	pool, err := storage.OpenPool(ctx, storage.Config{
		Dir: dir + "/pool", Image: dir + "/pool.img", SizeBytes: size,
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		return "", err
	}
	err = pool.Probe(ctx)
	how := "with copy-on-write clones"
	if !pool.Reflink() {
		how = "WITHOUT copy-on-write clones: every clone is a copy"
	}
	if err := errors.Join(err, pool.Close(true)); err != nil {
		return "", err
	}
	return "a pool was made and used, " + how, nil
}
