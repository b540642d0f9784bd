package qemu

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/cubesandbox/cubelet/internal/vmm"
)

// Machine type and CPU model. A memory image can only be restored under the same ones.
const (
	machineType = "microvm"
	cpuModelTCG = "max"
	cpuModelKVM = "host"
)

// Places on the virtio-mmio bus. The guest finds the devices from the last place to the
// first, so the first disk has the last one. Place 0 stays empty: its interrupt does not
// arrive at a guest without the legacy interrupt controller.
const (
	placeNet       = 1
	placeRNG       = 2
	placeFirstDisk = 23
	maxDisks       = placeFirstDisk - placeRNG
)

// profile is what the arguments depend on besides the machine: the node.
type profile struct {
	binary    string
	accel     string
	tbSizeMiB int // TCG's buffer for translated code
	tscKHz    int // of the host's time stamp counter, zero when unknown; for TCG's boot
	// bareState tells that the device state to restore has no section about the machine's
	// configuration: that of Freeze.
	bareState bool
}

// The descriptors that every machine has. Numbers stay below 64: beyond, a launcher
// needs milliseconds to grow its table. 0 is null, 1 and 2 are the log.
const (
	fdMonitor = 3
	fdTap     = 4 // null without a network card
	fdMemory  = 5
	fdConsole = 6
	fdFirst   = 7 // of those that depend on the machine
)

// fdNumbers are the other descriptors of a machine. Zero means that it has none.
type fdNumbers struct {
	state          int // restore
	kernel, initrd int // boot
	kvm            int
	disks          []int
}

// numberFDs is the order in which openFiles opens.
func numberFDs(p profile, m vmm.Machine) fdNumbers {
	fd := fdFirst - 1
	next := func() int { fd++; return fd }
	var n fdNumbers
	if m.Boot != nil {
		n.kernel, n.initrd = next(), next()
	} else {
		n.state = next()
	}
	if p.accel == AccelKVM {
		n.kvm = next()
	}
	for range m.Disks {
		n.disks = append(n.disks, next())
	}
	return n
}

// args returns QEMU's arguments for the machine. It is pure. Boot and restore of one
// machine differ in nothing that the device state depends on.
func args(p profile, owner string, m vmm.Machine) []string {
	n := numberFDs(p, m)
	a := []string{
		p.binary,
		"-name", "guest=" + owner,
		"-nodefaults", "-no-user-config", "-display", "none",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
		// A guest that reboots would need the kernel again, which a clone does not have.
		"-no-reboot",
		// Without the clock the guest's kernel polls for it for two seconds. The two
		// legacy timers are unused under ACPI's reduced hardware.
		"-machine", machineType + ",acpi=on,rtc=on,pit=off,pic=off,ioapic2=on,isa-serial=on,memory-backend=m0",
		"-smp", strconv.Itoa(m.VCPUs),
		"-m", fmt.Sprintf("size=%dM", m.MemoryMiB),
		"-object", memoryObject(m),
		// The thread pool serves disk requests; bounded, so that LimitsFor is.
		"-object", fmt.Sprintf("main-loop,id=loop0,thread-pool-max=%d", poolThreads),
		"-chardev", fmt.Sprintf("socket,id=qmp0,fd=%d,server=on,wait=off", fdMonitor),
		"-mon", "chardev=qmp0,mode=control",
	}
	a = append(a, fdset(fdConsole)...)
	a = append(a,
		"-chardev", fmt.Sprintf("file,id=console0,path=%s,append=on", fdsetPath(fdConsole)),
		"-serial", "chardev:console0",
	)
	a = append(a, accelArgs(p, n)...)
	a = append(a, deviceArgs(n, m)...)
	if m.Boot != nil {
		return append(a, bootArgs(p, n, m.Boot)...)
	}
	a = append(a, fdset(n.state)...)
	if p.bareState {
		a = append(a, "-global", "migration.send-configuration=off")
	}
	// -S: a restored machine waits for `cont`, also when it ran while it was saved.
	return append(a, "-S", "-incoming", "defer")
}

// memoryObject maps the file shared when the machine boots, so that it becomes the
// memory image, and privately when it is restored. QEMU opens the path again, which
// checks the file's own mode: the directories above it need not be accessible.
func memoryObject(m vmm.Machine) string {
	mapping := "share=on"
	if m.Boot == nil {
		mapping = "share=off,readonly=on,rom=off"
	}
	return fmt.Sprintf("memory-backend-file,id=m0,size=%dM,mem-path=/proc/self/fd/%d,merge=off,dump=off,%s", m.MemoryMiB, fdMemory, mapping)
}

func accelArgs(p profile, n fdNumbers) []string {
	if p.accel == AccelKVM {
		return append(fdset(n.kvm), "-accel", "kvm,device="+fdsetPath(n.kvm), "-cpu", cpuModelKVM)
	}
	return []string{"-accel", fmt.Sprintf("tcg,thread=multi,tb-size=%d", p.tbSizeMiB), "-cpu", cpuModelTCG}
}

// deviceArgs places every device on a bus of its own, so that neither the guest's names
// nor the device state depend on the order of arguments.
func deviceArgs(n fdNumbers, m vmm.Machine) []string {
	a := []string{"-object", "rng-builtin,id=rng0", "-device", "virtio-rng-device,rng=rng0," + place(placeRNG)}
	if m.MAC != "" {
		a = append(a,
			"-netdev", fmt.Sprintf("tap,id=net0,fd=%d", fdTap),
			"-device", fmt.Sprintf("virtio-net-device,netdev=net0,mac=%s,%s", m.MAC, place(placeNet)),
		)
	}
	for i, d := range m.Disks {
		access := "read-only=off,discard=unmap"
		if d.ReadOnly {
			access = "read-only=on"
		}
		a = append(a, fdset(n.disks[i])...)
		a = append(a,
			"-blockdev", fmt.Sprintf("driver=file,node-name=disk%d,filename=%s,locking=off,auto-read-only=off,%s", i, fdsetPath(n.disks[i]), access),
			"-device", fmt.Sprintf("virtio-blk-device,drive=disk%d,%s", i, place(placeFirstDisk-i)),
		)
	}
	return a
}

func bootArgs(p profile, n fdNumbers, b *vmm.Boot) []string {
	words := []string{b.Cmdline}
	if p.accel == AccelTCG {
		// An emulated processor does not speculate. Its time stamp counter is the host's,
		// and a guest with ACPI's reduced hardware has nothing to calibrate it with: it
		// must be told, or it waits for a timer tick for ever.
		words = append(words, "mitigations=off", "tsc=reliable")
		if p.tscKHz > 0 {
			words = append(words, fmt.Sprintf("tsc_early_khz=%d", p.tscKHz))
		}
	}
	return []string{
		"-kernel", fmt.Sprintf("/proc/self/fd/%d", n.kernel),
		"-initrd", fmt.Sprintf("/proc/self/fd/%d", n.initrd),
		"-append", strings.Join(words, " "),
	}
}

func place(n int) string { return fmt.Sprintf("bus=virtio-mmio-bus.%d", n) }

func fdset(fd int) []string { return []string{"-add-fd", fmt.Sprintf("fd=%d,set=%d", fd, fd)} }

func fdsetPath(fd int) string { return fmt.Sprintf("/dev/fdset/%d", fd) }
