package qemu

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/pagemap"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// Freeze saves a restored machine as it is at one instant and, unless told to stay, lets
// it go on. The new memory file shares its blocks with the machine's image where the file
// system can, and only the pages that the guest wrote are copied into it. The files can
// be restored, and are not synced; after an error they do not exist and the machine goes on.
// Codes: NotFound, FailedPrecondition (no QEMU, or a machine that was booted and so
// writes to its image itself), NoSpace.
func (d *Driver) Freeze(ctx context.Context, owner string, f vmm.Freeze) (frozen vmm.Frozen, err error) {
	err = d.withMonitor(ctx, owner, "freeze", func(ctx context.Context, c *qmp) error {
		inst, err := d.instance(ctx, owner)
		if err != nil {
			return err
		}
		frozen, err = freeze(ctx, c, inst.Process.PID, f)
		return err
	})
	return frozen, err
}

// clock collects timings, each from the end of the one before.
type clock struct {
	last    time.Time
	timings []vmm.Timing
}

func (t *clock) lap(name string) {
	now := time.Now()
	t.timings = append(t.timings, vmm.Timing{Name: name, Duration: now.Sub(t.last)})
	t.last = now
}

func freeze(ctx context.Context, c *qmp, pid int, f vmm.Freeze) (frozen vmm.Frozen, err error) {
	t := &clock{last: time.Now()}
	memory, places, err := cloneMemory(pid, f.MemoryPath)
	if err != nil {
		return frozen, err
	}
	defer func() {
		err = errors.Join(err, memory.Close())
		if err != nil {
			_ = os.Remove(f.MemoryPath)
			_ = os.Remove(f.StatePath)
		}
	}()
	t.lap("base")
	begin := t.last
	if err := c.execute(ctx, call{name: "stop"}); err != nil {
		return frozen, err
	}
	t.lap("stop")
	frozen.DirtyBytes, err = target{f, pid, memory, places}.save(ctx, c, t)
	if err != nil || !f.Stay {
		// It goes on even when the caller has left.
		err = errors.Join(err, c.execute(context.WithoutCancel(ctx), call{name: "cont"}))
		t.lap("cont")
	}
	frozen.Paused, frozen.Timings = t.last.Sub(begin), t.timings
	// The VMM's user opens the memory image by a path of its own.
	return frozen, errors.Join(err, memory.Chmod(0o444))
}

// target is where a freeze saves a machine.
type target struct {
	vmm.Freeze
	pid    int
	memory *os.File // a copy of the machine's image
	places []mapping
}

// save saves a machine that stands still and returns how much memory it copied.
func (f target) save(ctx context.Context, c *qmp, t *clock) (dirty int64, err error) {
	if err := saveDevices(ctx, c, f.StatePath); err != nil {
		return 0, err
	}
	t.lap("state")
	if dirty, err = copyDirty(f.pid, f.places, f.memory); err != nil {
		return 0, err
	}
	t.lap("memory")
	if f.WhileFrozen != nil {
		if err := f.WhileFrozen(); err != nil {
			return 0, err
		}
		t.lap("disks")
	}
	return dirty, nil
}

// saveDevices writes the device state of a machine that stands still to a new file. It
// takes the command that Xen uses, which unlike a migration leaves QEMU as it was and
// writes no memory.
func saveDevices(ctx context.Context, c *qmp, path string) (err error) {
	out, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	var set struct {
		ID int `json:"fdset-id"`
	}
	if err := c.execute(ctx, call{name: "add-fd", result: &set, file: out}); err != nil {
		return err
	}
	args := map[string]any{"filename": fdsetPath(set.ID), "live": false}
	err = c.execute(ctx, call{name: "xen-save-devices-state", args: args})
	remove := call{name: "remove-fd", args: map[string]any{"fdset-id": set.ID}}
	return errors.Join(err, c.execute(context.WithoutCancel(ctx), remove))
}

// configurationSection is the type of the section that a migration begins with, after
// its header. A state of saveDevices has none.
const configurationSection = 0x07

func isBareState(path string) (bool, error) {
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	const header = 8
	first := make([]byte, 1)
	if _, err := f.ReadAt(first, header); err != nil {
		return false, cube.Errorf(cube.CodeFailedPrecondition, "device state %s ends after its header: %w", path, err)
	}
	return first[0] != configurationSection, nil
}

// mapping is a part of a memory image that a process maps.
type mapping struct {
	at     pagemap.Range
	offset int64 // in the image
}

// cloneMemory makes path a copy of the image that the process maps privately, without
// copying blocks where the file system can, and tells where it is mapped.
func cloneMemory(pid int, path string) (_ *os.File, places []mapping, err error) {
	base, err := os.Open(fmt.Sprintf("/proc/%d/fd/%d", pid, fdMemory))
	if err != nil {
		return nil, nil, fmt.Errorf("open the memory image: %w", err)
	}
	defer base.Close()
	if places, err = findMappings(pid, base); err != nil {
		return nil, nil, err
	}
	memory, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, nil, err
	}
	if err := cloneFile(memory, base); err != nil {
		_ = memory.Close()
		_ = os.Remove(path)
		return nil, nil, fmt.Errorf("clone the memory image: %w", err)
	}
	return memory, places, nil
}

func cloneFile(dst, src *os.File) error {
	err := unix.IoctlFileClone(int(dst.Fd()), int(src.Fd()))
	if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EXDEV) && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOTTY) {
		return err
	}
	st, err := src.Stat()
	if err != nil {
		return err
	}
	if err := dst.Truncate(st.Size()); err != nil {
		return err
	}
	return copyExtents(dst, src, st.Size())
}

// copyExtents copies what is not a hole.
func copyExtents(dst, src *os.File, size int64) error {
	for at := int64(0); at < size; {
		from, err := unix.Seek(int(src.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil
		}
		if err != nil {
			return err
		}
		to, err := unix.Seek(int(src.Fd()), from, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		if _, err := io.Copy(io.NewOffsetWriter(dst, from), io.NewSectionReader(src, from, to-from)); err != nil {
			return err
		}
		at = to
	}
	return nil
}

// findMappings lists where the process maps the file.
func findMappings(pid int, file *os.File) ([]mapping, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &st); err != nil {
		return nil, err
	}
	maps, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return nil, err
	}
	defer maps.Close()
	var places []mapping
	lines := bufio.NewScanner(maps)
	for lines.Scan() {
		var (
			m            mapping
			access       string
			major, minor uint32
			inode        uint64
		)
		_, err := fmt.Sscanf(lines.Text(), "%x-%x %s %x %x:%x %d", &m.at.Start, &m.at.End, &access, &m.offset, &major, &minor, &inode)
		if err != nil || inode != st.Ino || unix.Mkdev(major, minor) != st.Dev {
			continue
		}
		if strings.HasSuffix(access, "s") {
			return nil, cube.Errorf(cube.CodeFailedPrecondition, "the machine writes to its memory image itself: only a restored one can be frozen")
		}
		places = append(places, m)
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if len(places) == 0 {
		return nil, cube.Errorf(cube.CodeFailedPrecondition, "the machine does not map its memory image")
	}
	return places, nil
}

// copyDirty writes the pages that differ from the image and returns their size in bytes.
func copyDirty(pid int, places []mapping, memory *os.File) (total int64, err error) {
	from, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	if err != nil {
		return 0, err
	}
	defer from.Close()
	buf := make([]byte, mib)
	for _, m := range places {
		dirty, err := pagemap.Dirty(pid, m.at)
		if err != nil {
			return 0, err
		}
		for _, r := range dirty {
			section := io.NewSectionReader(from, int64(r.Start), int64(r.Len()))
			to := io.NewOffsetWriter(memory, m.offset+int64(r.Start-m.at.Start))
			// Neither side has a shorter way that CopyBuffer could take instead of buf.
			n, err := io.CopyBuffer(struct{ io.Writer }{to}, struct{ io.Reader }{section}, buf)
			total += n
			if err != nil {
				return 0, fmt.Errorf("copy the guest's memory: %w", err)
			}
		}
	}
	return total, nil
}

// Tap returns the tap of the owner's running machine, for another machine to take over.
// The caller closes it. Codes: NotFound.
func (d *Driver) Tap(ctx context.Context, owner string) (*os.File, error) {
	inst, err := d.instance(ctx, owner)
	if err != nil {
		return nil, err
	}
	process, err := unix.PidfdOpen(inst.Process.PID, 0)
	if err != nil {
		return nil, fmt.Errorf("find the process of VMM %s: %w", owner, err)
	}
	defer unix.Close(process)
	fd, err := unix.PidfdGetfd(process, fdTap, 0)
	if err != nil {
		return nil, fmt.Errorf("take the tap of VMM %s: %w", owner, err)
	}
	return os.NewFile(uintptr(fd), "tap of "+owner), nil
}
