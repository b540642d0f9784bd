package doctor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Config says what to check. Boot, when set, boots a guest with the accelerator that
// the node would use and returns what it saw.
type Config struct {
	Root, KernelDir, LibexecDir string
	QEMU, Runc                  string
	Boot                        func(ctx context.Context) (string, error)
	Network                     func(ctx context.Context) (string, error)
	Pool                        func(ctx context.Context) (string, error)
}

const installFix = "run scripts/install-deps as root, or install the package yourself"

// Checks lists every requirement of a node, the simple ones first.
func Checks(c Config) []Check {
	return []Check{
		{"root", "mounts, namespaces and cgroups", func(context.Context) Result { return checkRoot() }},
		{"kernel", "loop-mounted pool, overlay snapshots, tap devices", func(context.Context) Result { return checkKernel() }},
		{"cgroups", "the limits of each VMM", func(context.Context) Result { return checkCgroups() }},
		{"files", "one descriptor per disk, tap and console of every sandbox", func(context.Context) Result { return checkNoFile() }},
		{"memory", "guest memory", func(context.Context) Result { return checkMemory() }},
		{"disk", "images, templates and the pool", func(context.Context) Result { return checkDisk(c.Root) }},
		{"qemu", "the virtual machine monitor", func(ctx context.Context) Result { return checkTool(ctx, c.QEMU, "--version") }},
		{"runc", "the jail of each VMM", func(ctx context.Context) Result { return checkTool(ctx, c.Runc, "--version") }},
		{"mkfs.xfs", "the pool with copy-on-write clones", func(ctx context.Context) Result { return checkTool(ctx, "mkfs.xfs", "-V") }},
		{"mkfs.ext4", "the writable layer of templates", func(ctx context.Context) Result { return checkTool(ctx, "mkfs.ext4", "-V") }},
		{"guest-kernel", "every guest", func(context.Context) Result { return checkGuestKernel(c.KernelDir) }},
		{"libexec", "the guest agent, the launcher and the shim", func(context.Context) Result { return checkLibexec(c.LibexecDir) }},
		{"network", "a namespace and a tap for each sandbox", probe(c.Network, "see the kernel's log; nftables, veth and tun are needed")},
		{"pool", "copy-on-write clones of disks and memory", probe(c.Pool, "put the root on a disk with free space")},
		{"accelerator", "running guests at all", probe(c.Boot, "read the console above; with --accel tcg no hardware support is needed")},
	}
}

// probe wraps a check that tries the real thing.
func probe(f func(context.Context) (string, error), fix string) func(context.Context) Result {
	return func(ctx context.Context) Result {
		if f == nil {
			return warn("", "not tried")
		}
		ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
		defer cancel()
		detail, err := f(ctx)
		if err != nil {
			return fail(fix, "%v", err)
		}
		return ok("%s", detail)
	}
}

func checkRoot() Result {
	if os.Geteuid() != 0 {
		return fail("run as root", "running as uid %d", os.Geteuid())
	}
	return ok("running as root")
}

func checkKernel() Result {
	var u syscall.Utsname
	if err := syscall.Uname(&u); err != nil {
		return fail("", "uname: %v", err)
	}
	b, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		return fail("mount /proc", "%v", err)
	}
	have := strings.Fields(string(b))
	var missing []string
	for _, fs := range []string{"xfs", "overlay", "tmpfs"} {
		if !slices.Contains(have, fs) {
			missing = append(missing, "file system "+fs)
		}
	}
	for _, dev := range []string{"/dev/net/tun", "/dev/loop-control"} {
		if _, err := os.Stat(dev); err != nil {
			missing = append(missing, dev)
		}
	}
	if runtime.GOARCH != "amd64" {
		missing = append(missing, "an x86-64 processor")
	}
	if len(missing) > 0 {
		return fail("load the module (modprobe xfs overlay tun loop) or use another kernel", "missing: %s", strings.Join(missing, ", "))
	}
	return ok("Linux %s with xfs, overlay, tun and loop", charsToString(u.Release[:]))
}

func charsToString(c []int8) string {
	b := make([]byte, 0, len(c))
	for _, v := range c {
		if v == 0 {
			break
		}
		b = append(b, byte(v))
	}
	return string(b)
}

func checkCgroups() Result {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return fail("mount /proc", "%v", err)
	}
	v1 := bytes.Contains(b, []byte(" - cgroup "))
	v2 := bytes.Contains(b, []byte(" - cgroup2 "))
	switch {
	case v1:
		for _, c := range []string{"memory", "cpu", "pids", "devices", "freezer"} {
			if _, err := os.Stat(filepath.Join("/sys/fs/cgroup", c)); err != nil {
				return fail("mount the cgroup controllers", "cgroup v1 without the controller %s", c)
			}
		}
		return ok("cgroup v1 with memory, cpu, pids, devices and freezer")
	case v2:
		return ok("cgroup v2")
	}
	return fail("mount cgroup2 on /sys/fs/cgroup", "no cgroup hierarchy is mounted")
}

func checkNoFile() Result {
	var l syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l); err != nil {
		return fail("", "getrlimit: %v", err)
	}
	const want = 16384
	if l.Max < want {
		return warn("raise the hard limit of open files (ulimit -Hn)", "at most %d open files; %d are advised", l.Max, want)
	}
	return ok("at most %d open files", l.Max)
}

func checkMemory() Result {
	var s syscall.Sysinfo_t
	if err := syscall.Sysinfo(&s); err != nil {
		return fail("", "sysinfo: %v", err)
	}
	total := uint64(s.Totalram) * uint64(s.Unit) >> 20
	if total < 2048 {
		return warn("use smaller guests (--memory 256)", "%d MiB of memory", total)
	}
	return ok("%d MiB of memory", total)
}

func checkDisk(root string) Result {
	dir := root
	for dir != "/" {
		if _, err := os.Stat(dir); err == nil {
			break
		}
		dir = filepath.Dir(dir)
	}
	var s syscall.Statfs_t
	if err := syscall.Statfs(dir, &s); err != nil {
		return fail("", "statfs %s: %v", dir, err)
	}
	free := s.Bavail * uint64(s.Bsize) >> 20
	switch {
	case free < 4096:
		return fail("free disk space, or use another --root", "%d MiB free below %s; 4096 are needed", free, dir)
	case free < 16384:
		return warn("free disk space before building many templates", "%d MiB free below %s", free, dir)
	}
	return ok("%d MiB free below %s", free, dir)
}

func checkTool(ctx context.Context, name, arg string) Result {
	path, err := exec.LookPath(name)
	if err != nil {
		return fail(installFix, "%s is not installed", name)
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, arg).CombinedOutput()
	if err != nil {
		return fail(installFix, "%s %s: %v", path, arg, err)
	}
	first, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	return ok("%s: %s", path, first)
}

func checkGuestKernel(dir string) Result {
	release, err := os.ReadFile(filepath.Join(dir, "release"))
	if err == nil {
		_, err = os.Stat(filepath.Join(dir, "vmlinuz"))
	}
	if err == nil {
		_, err = os.Stat(filepath.Join(dir, "modules", "modules.dep"))
	}
	if err != nil {
		return fail("run scripts/fetch-kernel "+dir, "%v", err)
	}
	return ok("Linux %s in %s", strings.TrimSpace(string(release)), dir)
}

func checkLibexec(dir string) Result {
	var errs []error
	for _, name := range []string{"cube-agent", "vmm-launcher", "containerd-shim-runc-v2"} {
		fi, err := os.Stat(filepath.Join(dir, name))
		if err == nil && fi.Mode()&0o111 == 0 {
			err = fmt.Errorf("%s is not executable", name)
		}
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return fail("run make build, or give --libexec", "%v", err)
	}
	return ok("cube-agent, vmm-launcher and containerd-shim-runc-v2 in %s", dir)
}
