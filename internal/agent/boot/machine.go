package boot

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Machine is the guest as /init and /shutdown change it. It implements agent.Machine.
type Machine struct {
	log   *slog.Logger
	layer int // descriptor of the writable layer's file system
	files *identityFiles

	off sync.Once
}

// SetTime sets the clock.
func (m *Machine) SetTime(t time.Time) error {
	ts, err := unix.TimeToTimespec(t)
	if err != nil {
		return err
	}
	return os.NewSyscallError("clock_settime", unix.ClockSettime(unix.CLOCK_REALTIME, &ts))
}

// randPoolInfo is struct rand_pool_info of linux/random.h with room for what we add.
type randPoolInfo struct {
	bits, size int32
	buf        [512]byte
}

// AddEntropy mixes b into the kernel's pool and makes its generator use it at once, so
// that two machines restored from one image do not draw the same numbers.
func (m *Machine) AddEntropy(b []byte) error {
	fd, err := unix.Open("/dev/urandom", unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: "/dev/urandom", Err: err}
	}
	defer unix.Close(fd)
	var info randPoolInfo
	n := copy(info.buf[:], b)
	info.bits, info.size = int32(n*8), int32(n)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.RNDADDENTROPY, uintptr(unsafe.Pointer(&info))); errno != 0 {
		return os.NewSyscallError("RNDADDENTROPY", errno)
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.RNDRESEEDCRNG, 0); errno != 0 {
		return os.NewSyscallError("RNDRESEEDCRNG", errno)
	}
	return nil
}

// SetHostname sets the host name and the files that repeat it.
func (m *Machine) SetHostname(name string) error {
	if err := checkHostname(name); err != nil {
		return err
	}
	if err := unix.Sethostname([]byte(name)); err != nil {
		return os.NewSyscallError("sethostname", err)
	}
	return m.files.setHostname(name)
}

// SetMachineID writes /etc/machine-id.
func (m *Machine) SetMachineID(id string) error { return m.files.setMachineID(id) }

// MakeDir makes an absolute path a directory, with its parents, when nothing is there.
// What is made belongs to the user.
func (m *Machine) MakeDir(path string, uid, gid int) error {
	if !filepath.IsAbs(path) {
		return fmt.Errorf("%q is not an absolute path", path)
	}
	var missing []string
	for p := filepath.Clean(path); ; p = filepath.Dir(p) {
		if _, err := os.Stat(p); err == nil {
			break
		} else if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		missing = append(missing, p)
	}
	for _, p := range slices.Backward(missing) {
		if err := os.Mkdir(p, 0o755); err != nil {
			return err
		}
		if err := os.Lchown(p, uid, gid); err != nil {
			return err
		}
	}
	return nil
}

// SetNameservers writes /etc/resolv.conf.
func (m *Machine) SetNameservers(servers []string) error { return m.files.setNameservers(servers) }

// How long programs have to end by themselves when the machine is powered off.
const (
	termWait = 2 * time.Second
	killWait = time.Second
)

// PowerOff ends all programs, makes the disks clean and powers the machine off. A second
// call waits for the first.
func (m *Machine) PowerOff() error {
	var err error
	m.off.Do(func() {
		_ = unix.Kill(-1, unix.SIGTERM)
		if !waitEmpty(termWait) {
			_ = unix.Kill(-1, unix.SIGKILL)
			waitEmpty(killWait)
		}
		unix.Sync()
		// The layer's mount is hidden below the overlay and cannot be unmounted. A frozen
		// file system is as clean as an unmounted one: its journal needs no replay.
		if errno := ioctl(m.layer, fiFreeze); errno != 0 && !errors.Is(errno, unix.EBUSY) {
			m.log.Warn("freeze the writable layer", "err", errno)
		}
		err = os.NewSyscallError("reboot", unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF))
	})
	return err
}

// fiFreeze is FIFREEZE of linux/fs.h.
const fiFreeze = 0xc0045877

func ioctl(fd int, request uintptr) unix.Errno {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, 0)
	return errno
}

// waitEmpty waits until no program is left and reports whether that is so.
func waitEmpty(limit time.Duration) bool {
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		b, err := os.ReadFile(CgroupDir + "/cgroup.events")
		if err == nil && strings.Contains(string(b), "populated 0") {
			return true
		}
	}
	return false
}
