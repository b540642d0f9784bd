package initramfs

import (
	"strings"

	cube "github.com/cubesandbox/cubelet"
)

// Cmdline returns the kernel command line of a guest with the default subnet, followed
// by extra parameters. What depends on the accelerator is added by internal/vmm/qemu.
func Cmdline(extra ...string) string {
	gateway, guest, err := cube.NetworkSpec{}.Addresses()
	if err != nil {
		panic("the default guest subnet is invalid: " + err.Error())
	}
	words := []string{
		"console=ttyS0",
		"quiet",
		// A triple fault ends the machine (QEMU runs with -no-reboot) where the keyboard
		// controller and ACPI reset of the default do not exist.
		"reboot=t",
		"panic=-1",
		// Tests of the kernel's own ciphers and of BIOS disks: only time.
		"cryptomgr.notests",
		"edd=off",
		"rdinit=/init",
		"cube.root=/dev/vda",
		"cube.layer=/dev/vdb",
		"cube.address=" + guest.String(),
		"cube.gateway=" + gateway.Addr().String(),
	}
	return strings.Join(append(words, extra...), " ")
}
