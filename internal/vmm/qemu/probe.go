package qemu

import "fmt"

// ProbeArgs returns the arguments of a QEMU that boots a guest without disks or network
// and ends with it, its console on standard output. Only the accelerator is the point.
func ProbeArgs(accel, kernel, initrd string) []string {
	cpu := cpuModelTCG
	words := "console=ttyS0 quiet reboot=t panic=-1 rdinit=/init"
	if accel == AccelKVM {
		cpu = cpuModelKVM
	} else {
		words += " mitigations=off tsc=reliable"
		if khz := measureTSC(); khz > 0 {
			words += fmt.Sprintf(" tsc_early_khz=%d", khz)
		}
	}
	return []string{
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-machine", machineType + ",acpi=on,rtc=on,pit=off,pic=off,isa-serial=on",
		"-accel", accel, "-cpu", cpu, "-m", "256M", "-serial", "stdio",
		"-kernel", kernel, "-initrd", initrd, "-append", words,
	}
}
