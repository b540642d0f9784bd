package runc

import (
	"runtime"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// seccompProfile allows what a VMM process needs and answers everything else with
// EPERM. It is our own short list, because libseccomp needs 16 ms per container to
// compile containerd's default profile and a small part of that for this one.
//
// How the list came about: `strace -f -c` of vmm-launcher, and of QEMU 10.0 (microvm,
// TCG with two vCPU threads, virtio-blk on a file, virtio-net on a tap, virtio-rng,
// file chardevs, QMP, memory-backend-file) through boot, stop, migrate to a file,
// xen-save-devices-state, cont and quit, with QEMU's own -sandbox on; to that the
// siblings of each call that another libc, kernel or I/O engine uses in its place
// (preadv2 for preadv), what runc calls between loading the filter and execve, and
// the socket calls of a QMP listener that is handed in. On KVM all of the difference
// is in ioctl.
//
// Left out on purpose, although QEMU tries them and goes on without: io_uring_setup
// (falls back to epoll and threads), connect, and every way to start a process. QEMU
// adds its own filter on top (prctl, seccomp).
func seccompProfile() *specs.LinuxSeccomp {
	errno := func(e unix.Errno) *uint { v := uint(e); return &v }
	return &specs.LinuxSeccomp{
		DefaultAction:   specs.ActErrno,
		DefaultErrnoRet: errno(unix.EPERM),
		Architectures:   seccompArchitectures(),
		Syscalls: []specs.LinuxSyscall{
			{Names: allowedCalls(), Action: specs.ActAllow},
			{
				// Threads only: no VMM ever needs a second process.
				Names:  []string{"clone"},
				Action: specs.ActAllow,
				Args: []specs.LinuxSeccompArg{{
					Index: 0, Value: unix.CLONE_THREAD, ValueTwo: unix.CLONE_THREAD, Op: specs.OpMaskedEqual,
				}},
			},
			// Its flags are in memory, out of the filter's sight: ENOSYS makes libc use clone.
			{Names: []string{"clone3"}, Action: specs.ActErrno, ErrnoRet: errno(unix.ENOSYS)},
			{
				Names:  []string{"socket"},
				Action: specs.ActAllow,
				Args:   []specs.LinuxSeccompArg{{Index: 0, Value: unix.AF_UNIX, Op: specs.OpEqualTo}},
			},
		},
	}
}

// seccompArchitectures names the native one only: a call of any other kills.
func seccompArchitectures() []specs.Arch {
	if runtime.GOARCH == "arm64" {
		return []specs.Arch{specs.ArchAARCH64}
	}
	return []specs.Arch{specs.ArchX86_64}
}

func allowedCalls() []string {
	return []string{
		// memory
		"brk", "get_mempolicy", "madvise", "membarrier", "memfd_create", "mmap", "mprotect", "mremap", "msync",
		"munmap", "set_mempolicy",
		// files
		"access", "chdir", "close", "close_range", "dup", "dup2", "dup3", "faccessat", "faccessat2", "fadvise64",
		"fallocate", "fchdir", "fcntl", "fdatasync", "flock", "fstat", "fstatfs", "fsync", "ftruncate", "getcwd",
		"getdents64", "ioctl", "lseek", "lstat", "newfstatat", "open", "openat", "openat2", "pipe2", "pread64",
		"preadv", "preadv2", "pwrite64", "pwritev", "pwritev2", "read", "readlink", "readlinkat", "readv", "rename",
		"renameat", "renameat2", "stat", "statfs", "statx", "sync_file_range", "unlink", "unlinkat", "write", "writev",
		// waiting
		"epoll_create1", "epoll_ctl", "epoll_pwait", "epoll_pwait2", "epoll_wait", "eventfd2", "poll", "ppoll",
		"pselect6", "select", "signalfd4", "timerfd_create", "timerfd_gettime", "timerfd_settime",
		// unix sockets
		"accept", "accept4", "bind", "getpeername", "getsockname", "getsockopt", "listen", "recvfrom", "recvmsg",
		"sendmsg", "sendto", "setsockopt", "shutdown",
		// the process and its threads
		"arch_prctl", "execve", "exit", "exit_group", "futex", "futex_waitv", "getegid", "geteuid", "getgid", "getpid",
		"getppid", "getrandom", "getrlimit", "getrusage", "gettid", "getuid", "prctl", "prlimit64", "rseq",
		"sched_getaffinity", "sched_yield", "seccomp", "set_robust_list", "set_tid_address", "sysinfo", "tgkill", "uname",
		// signals
		"restart_syscall", "rt_sigaction", "rt_sigpending", "rt_sigprocmask", "rt_sigreturn", "rt_sigsuspend",
		"rt_sigtimedwait", "sigaltstack",
		// time
		"clock_getres", "clock_gettime", "clock_nanosleep", "gettimeofday", "nanosleep", "time", "timer_create",
		"timer_delete", "timer_gettime", "timer_settime",
	}
}
