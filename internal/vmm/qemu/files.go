package qemu

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// mib is one MiB in bytes.
const mib = 1 << 20

// fileSet is what QEMU gets, by descriptor: files[i] becomes i. The first error sticks.
type fileSet struct {
	files []*os.File
	owned []*os.File // those to close
	err   error
}

// open adds a file; after an error nothing is opened any more.
func (s *fileSet) open(path string, flags int, perm os.FileMode) {
	if s.err != nil {
		return
	}
	f, err := os.OpenFile(path, flags, perm)
	s.add(f, err)
}

func (s *fileSet) add(f *os.File, err error) {
	if s.err == nil {
		s.err = err
	}
	if err == nil {
		s.files = append(s.files, f)
		s.owned = append(s.owned, f)
	}
}

// repeat adds a file that is in the set already or is not the set's to close.
func (s *fileSet) repeat(f *os.File) { s.files = append(s.files, f) }

func (s *fileSet) close() {
	for _, f := range s.owned {
		_ = f.Close()
	}
}

// openFiles opens and makes everything the machine needs. The caller closes the set;
// the files that were made stay.
func (d *Driver) openFiles(inst vmm.Instance, m vmm.Machine, tap *os.File) (*fileSet, error) {
	s := &fileSet{}
	s.open(os.DevNull, os.O_RDWR, 0)
	s.open(d.logPath(inst.Owner), os.O_CREATE|os.O_WRONLY|os.O_APPEND|os.O_TRUNC, 0o600)
	if s.err != nil {
		s.close()
		return nil, s.err
	}
	s.repeat(s.files[1]) // standard output and error are one file
	s.add(listenMonitor(d.monitorPath(inst.Owner)))
	if tap == nil {
		tap = s.files[0]
	}
	s.repeat(tap)
	d.openMemory(s, inst, m)
	s.open(m.ConsolePath, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if m.Boot != nil {
		s.open(m.Boot.Kernel, os.O_RDONLY, 0)
		s.open(m.Boot.Initrd, os.O_RDONLY, 0)
	} else {
		s.open(m.StatePath, os.O_RDONLY, 0)
	}
	if d.profile.accel == AccelKVM {
		s.open(kvmDevice, os.O_RDWR, 0)
	}
	for _, disk := range m.Disks {
		flags := os.O_RDWR
		if disk.ReadOnly {
			flags = os.O_RDONLY
		}
		s.open(disk.Path, flags, 0)
	}
	if s.err != nil {
		s.close()
		return nil, s.err
	}
	return s, nil
}

// openMemory creates the memory file of a machine that boots, owned by the VMM's own
// user, and opens the immutable one of a machine that is restored.
func (d *Driver) openMemory(s *fileSet, inst vmm.Instance, m vmm.Machine) {
	if m.Boot == nil {
		s.open(m.MemoryPath, os.O_RDONLY, 0)
		return
	}
	s.open(m.MemoryPath, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if s.err != nil {
		return
	}
	f := s.files[len(s.files)-1]
	if s.err = f.Truncate(int64(m.MemoryMiB) * mib); s.err == nil {
		s.err = f.Chown(inst.UID, inst.UID)
	}
}

// listenMonitor makes the monitor's socket. QEMU accepts on it, so a client can connect
// before QEMU is up, and again after the daemon was restarted.
func listenMonitor(path string) (*os.File, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	f, err := l.File()
	err = errors.Join(err, os.Chmod(path, 0o600), l.Close())
	if err != nil && f != nil {
		_ = f.Close()
	}
	return f, err
}

// checkMachine refuses what cannot work, before anything is started.
func checkMachine(m vmm.Machine, tap *os.File) error {
	switch {
	case m.VCPUs < 1, m.MemoryMiB < 1:
		return cube.Errorf(cube.CodeInvalid, "a machine needs at least one vCPU and 1 MiB of memory")
	case (m.Boot != nil) == (m.StatePath != ""):
		return cube.Errorf(cube.CodeInvalid, "a machine is either booted or restored")
	case (m.MAC != "") != (tap != nil):
		return cube.Errorf(cube.CodeInvalid, "a machine has both a MAC address and a tap or neither")
	case len(m.Disks) > maxDisks:
		return cube.Errorf(cube.CodeInvalid, "%d disks are more than the %d that fit", len(m.Disks), maxDisks)
	case strings.ContainsAny(m.MAC, ", "):
		return cube.Errorf(cube.CodeInvalid, "%q is not a MAC address", m.MAC)
	}
	if m.Boot != nil {
		return nil
	}
	return checkImage(m)
}

// checkImage compares the files of a memory image with the machine. QEMU itself would
// map a file that is too short, and its guest would die of SIGBUS later.
func checkImage(m vmm.Machine) error {
	st, err := os.Stat(m.MemoryPath)
	if err != nil {
		return fmt.Errorf("look at the memory image: %w", err)
	}
	if want := int64(m.MemoryMiB) * mib; st.Size() != want {
		return cube.Errorf(cube.CodeFailedPrecondition, "memory image %s has %d bytes, and a machine of %d MiB has %d: it is of another size or damaged",
			m.MemoryPath, st.Size(), m.MemoryMiB, want)
	}
	f, err := os.Open(m.StatePath)
	if err != nil {
		return fmt.Errorf("look at the device state: %w", err)
	}
	defer f.Close()
	if err := checkStateHeader(f); err != nil {
		return cube.Errorf(cube.CodeFailedPrecondition, "device state %s: %w", m.StatePath, err)
	}
	return nil
}

// The first eight bytes of a migration stream.
const (
	stateMagic   = 0x5145564d // "QEVM"
	stateVersion = 3
)

func checkStateHeader(r io.Reader) error {
	var header struct{ Magic, Version uint32 }
	if err := binary.Read(r, binary.BigEndian, &header); err != nil {
		return errors.New("it is shorter than its header")
	}
	if header.Magic != stateMagic {
		return errors.New("it is not a QEMU device state")
	}
	if header.Version != stateVersion {
		return fmt.Errorf("format %d is not known", header.Version)
	}
	return nil
}

// logTail returns the end of the owner's QEMU log for an error message, or "".
func (d *Driver) logTail(owner string) string {
	const most = 2048 // bytes
	f, err := os.Open(d.logPath(owner))
	if err != nil {
		return ""
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return ""
	}
	b, err := io.ReadAll(io.NewSectionReader(f, max(0, st.Size()-most), most))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(strings.ToValidUTF8(string(b), "?"))
}

// syncMemory writes the guest's memory file to the disk, found through the process that
// maps it: this works for machines that an earlier daemon started.
func syncMemory(inst vmm.Instance) error {
	f, err := os.Open(fmt.Sprintf("/proc/%d/fd/%d", inst.Process.PID, fdMemory))
	if err != nil {
		return fmt.Errorf("open the memory of VMM %s: %w", inst.Owner, err)
	}
	defer f.Close()
	if err := unix.Fdatasync(int(f.Fd())); err != nil {
		return fmt.Errorf("write the memory of VMM %s: %w", inst.Owner, err)
	}
	return nil
}
