package runc

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

const (
	// Paths inside the container.
	launcherPath = "/launcher"
	slotPath     = "/run/cube"
	socketName   = "launch.sock"

	// groupAnnotation makes shims of equal value one process.
	groupAnnotation = "io.containerd.runc.v2.group"

	// What a waiting launcher may use: a fraction of it is enough.
	waitingMemory = 64 << 20
	waitingPIDs   = 64

	// A VMM goes before the daemon when the host runs out of memory.
	vmmOOMScore = 500
	vmmFiles    = 4096

	kvmMajor, kvmMinor = 10, 232
)

// hostDir is a directory of the host that the VMM sees read-only.
type hostDir struct{ source, target string }

// hostDirs are where QEMU, its libraries and its firmware live. On a merged /usr the
// other three are symbolic links into it and are bound at their own names.
func hostDirs() []hostDir {
	dirs := []hostDir{{"/usr", "/usr"}}
	for _, name := range []string{"/lib", "/lib64", "/bin"} {
		if source, err := filepath.EvalSymlinks(name); err == nil {
			dirs = append(dirs, hostDir{source, name})
		}
	}
	return dirs
}

// makeSkeleton creates the empty tree that is every container's read-only root.
func makeSkeleton(root string) error {
	dirs := []string{"/dev", "/proc", "/tmp", slotPath}
	for _, d := range hostDirs() {
		dirs = append(dirs, d.target)
	}
	for _, d := range append(dirs, "/run", "/") {
		path := filepath.Join(root, d)
		if err := os.MkdirAll(path, 0o755); err != nil {
			return fmt.Errorf("create root skeleton: %w", err)
		}
		// Whatever the umask: the VMM's user must be able to pass.
		if err := os.Chmod(path, 0o755); err != nil {
			return fmt.Errorf("create root skeleton: %w", err)
		}
	}
	f, err := os.OpenFile(filepath.Join(root, launcherPath), os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		return fmt.Errorf("create root skeleton: %w", err)
	}
	return f.Close()
}

// jail is what the specs of all slots have in common.
type jail struct {
	skeleton     string
	launcher     string
	cgroupParent string
	kvm          bool
	maxFiles     uint64 // the daemon's own hard limit, which a child cannot exceed
	oomScoreAdj  int
	dirs         []hostDir
}

func newJail(cfg Config) (jail, error) {
	j := jail{
		skeleton:     filepath.Join(cfg.RunDir, "root"),
		launcher:     cfg.Launcher,
		cgroupParent: cfg.CgroupParent,
		kvm:          cfg.KVM,
		oomScoreAdj:  max(vmmOOMScore, ownOOMScore()),
		dirs:         hostDirs(),
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return jail{}, fmt.Errorf("read limit of open files: %w", err)
	}
	j.maxFiles = min(vmmFiles, limit.Max)
	return j, makeSkeleton(j.skeleton)
}

// ownOOMScore is the least that a child can have without CAP_SYS_RESOURCE.
func ownOOMScore() int {
	data, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		return 0
	}
	score, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		return 0
	}
	return score
}

// spec describes the container of one slot: a user of its own, no capability, no way
// to gain one, every namespace new (the network one empty), a read-only root that
// holds only what QEMU is made of, and the one directory of the slot.
func (j jail) spec(s *slot, group string) *specs.Spec {
	id := uint32(s.uid)
	return &specs.Spec{
		Version:  specs.Version,
		Hostname: "vmm",
		Root:     &specs.Root{Path: j.skeleton, Readonly: true},
		Process: &specs.Process{
			User:            specs.User{UID: id, GID: id},
			Args:            []string{launcherPath, slotPath + "/" + socketName},
			Env:             []string{"GOMAXPROCS=1"},
			Cwd:             "/",
			Capabilities:    &specs.LinuxCapabilities{},
			NoNewPrivileges: true,
			OOMScoreAdj:     &j.oomScoreAdj,
			Rlimits: []specs.POSIXRlimit{
				{Type: "RLIMIT_CORE"},
				{Type: "RLIMIT_NOFILE", Hard: j.maxFiles, Soft: j.maxFiles},
			},
		},
		Mounts:      j.mounts(s),
		Annotations: map[string]string{groupAnnotation: group},
		Linux: &specs.Linux{
			CgroupsPath: j.cgroupPath(s.name),
			Resources:   j.resources(),
			Devices:     j.devices(id),
			Seccomp:     seccompProfile(),
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace},
				{Type: specs.IPCNamespace},
				{Type: specs.UTSNamespace},
				{Type: specs.MountNamespace},
				{Type: specs.NetworkNamespace},
			},
			MaskedPaths:   []string{"/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/acpi", "/proc/scsi"},
			ReadonlyPaths: []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"},
		},
	}
}

func (j jail) cgroupPath(name string) string { return j.cgroupParent + "/" + name }

func (j jail) mounts(s *slot) []specs.Mount {
	mounts := []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "noexec", "mode=755", "size=64k"}},
		{Destination: "/dev/shm", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "noexec", "nodev", "mode=1777", "size=1m"}},
		{Destination: "/tmp", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "noexec", "nodev", "mode=1777", "size=1m"}},
	}
	for _, d := range j.dirs {
		mounts = append(mounts, specs.Mount{
			Destination: d.target, Type: "bind", Source: d.source, Options: []string{"rbind", "ro", "nosuid", "nodev"},
		})
	}
	return append(mounts,
		specs.Mount{Destination: launcherPath, Type: "bind", Source: j.launcher, Options: []string{"bind", "ro", "nosuid", "nodev"}},
		specs.Mount{Destination: slotPath, Type: "bind", Source: s.shared(), Options: []string{"bind", "rw", "nosuid", "nodev", "noexec"}},
	)
}

func (j jail) resources() *specs.LinuxResources {
	memory, pids := int64(waitingMemory), int64(waitingPIDs)
	r := &specs.LinuxResources{
		Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}},
		Memory:  &specs.LinuxMemory{Limit: &memory},
		Pids:    &specs.LinuxPids{Limit: &pids},
	}
	if j.kvm {
		major, minor := int64(kvmMajor), int64(kvmMinor)
		r.Devices = append(r.Devices, specs.LinuxDeviceCgroup{Allow: true, Type: "c", Major: &major, Minor: &minor, Access: "rw"})
	}
	return r
}

func (j jail) devices(gid uint32) []specs.LinuxDevice {
	if !j.kvm {
		return nil
	}
	mode, root := os.FileMode(0o660), uint32(0)
	return []specs.LinuxDevice{{
		Path: "/dev/kvm", Type: "c", Major: kvmMajor, Minor: kvmMinor, FileMode: &mode, UID: &root, GID: &gid,
	}}
}
