package qemu

import (
	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// What QEMU itself needs besides the guest's memory.
const (
	// poolThreads bounds the threads that serve disk requests.
	poolThreads = 16
	// otherThreads: main loop, RCU, migration, and reserve.
	otherThreads = 16
	// overheadMiB is QEMU's private memory without translated code, kernel memory of its
	// process included.
	overheadMiB = 64
	// overheadPerVCPUMiB is for the stacks and the emulated TLBs of one vCPU.
	overheadPerVCPUMiB = 16
	// deviceMilliCPUs is for the main loop, so that a busy guest does not starve its own
	// devices.
	deviceMilliCPUs = 250
)

// LimitsFor returns the bounds of the VMM process of a machine of that size.
func (d *Driver) LimitsFor(r cube.Resources) vmm.Limits {
	return limitsFor(d.profile, r)
}

func limitsFor(p profile, r cube.Resources) vmm.Limits {
	overhead := overheadMiB + overheadPerVCPUMiB*r.VCPUs
	if p.accel == AccelTCG {
		overhead += p.tbSizeMiB
	}
	return vmm.Limits{
		MemoryBytes: int64(r.MemoryMiB+overhead) << 20,
		MilliCPUs:   1000*r.VCPUs + deviceMilliCPUs,
		PIDs:        r.VCPUs + poolThreads + otherThreads,
	}
}
