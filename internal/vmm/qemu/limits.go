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
	// overheadMiB and overheadPerVCPUMiB are QEMU's private memory without guest memory
	// and translated code, and the kernel's for the process. Measured with QEMU 10.0.2:
	// after starting Python four times a TCG guest's anonymous memory was 100 MiB with
	// tb-size 64, with one vCPU and with four: 36 MiB without the buffer. The rest is for
	// page tables, sockets and requests in flight.
	overheadMiB        = 64
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
