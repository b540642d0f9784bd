// Package vmm holds the data that describes a virtual machine and the process that
// runs it. It has no behaviour: internal/vmm/qemu drives QEMU, internal/runc jails it.
package vmm

import "time"

// Limits bound one VMM process tree on the host.
type Limits struct {
	MemoryBytes int64 // cgroup memory limit: guest memory and the VMM's own overhead
	MilliCPUs   int   // CPU quota, 1000 = one core
	PIDs        int   // processes and threads
}

// Process is the identity of a host process: a PID alone can be reused.
type Process struct {
	PID       int    `json:"pid"`
	StartTime uint64 `json:"startTime"` // field 22 of /proc/PID/stat, in clock ticks since boot
}

// Instance is one claimed VMM slot, named after the sandbox or template that owns it.
type Instance struct {
	Owner   string  `json:"owner"`
	Slot    string  `json:"slot"` // name of the runc container
	Process Process `json:"process"`
	UID     int     `json:"uid"` // of the VMM on the host, its own
}

// Exit tells how a VMM process ended.
type Exit struct {
	Owner string
	Code  int // exit code, 128+signal when killed
	Time  time.Time
}

// Disk is one virtio-blk device, in the guest vda, vdb, … in the order of Machine.Disks.
type Disk struct {
	Path     string `json:"path"`
	ReadOnly bool   `json:"readOnly"`
}

// Boot starts a machine cold. Kernel and initrd are host paths.
type Boot struct {
	Kernel  string `json:"kernel"`
	Initrd  string `json:"initrd"`
	Cmdline string `json:"cmdline"`
}

// Machine describes one virtual machine completely. Exactly one of Boot and
// StatePath is set.
type Machine struct {
	VCPUs     int `json:"vcpus"`
	MemoryMiB int `json:"memoryMiB"`
	// MemoryPath is the memory file on the pool. With Boot it is created, shared and
	// written to; with StatePath it is mapped privately and never changed.
	MemoryPath string `json:"memoryPath"`
	// StatePath is the device state to restore.
	StatePath string `json:"statePath,omitempty"`
	Boot      *Boot  `json:"boot,omitempty"`
	Disks     []Disk `json:"disks"`
	MAC       string `json:"mac"`
	// ConsolePath is the file that the guest's console is appended to.
	ConsolePath string `json:"consolePath"`
}

// Freeze is a request to save a machine as it is at one instant, by new files.
type Freeze struct {
	StatePath  string // device state
	MemoryPath string // complete memory image; shares blocks with the one below it
	// WhileFrozen is called between the saves and the machine's going on, for the disks.
	WhileFrozen func() error
	// Stay leaves the machine stopped, unless there is an error.
	Stay bool
}

// Frozen tells what a Freeze did.
type Frozen struct {
	DirtyBytes int64         // memory that was written
	Paused     time.Duration // how long the vCPUs stood still; with Stay: until the return
	Timings    []Timing
}

// Timing tells how long one part took.
type Timing struct {
	Name     string
	Duration time.Duration
}
