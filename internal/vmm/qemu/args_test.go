package qemu

import (
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

var update = flag.Bool("update", false, "write the golden files")

func restoredMachine() vmm.Machine {
	return vmm.Machine{
		VCPUs: 2, MemoryMiB: 512, MemoryPath: "/pool/memory", StatePath: "/pool/state",
		Disks: []vmm.Disk{{Path: "/pool/root", ReadOnly: true}, {Path: "/pool/layer"}},
		MAC:   testMAC, ConsolePath: "/pool/console",
	}
}

func bootedMachine() vmm.Machine {
	m := restoredMachine()
	m.StatePath = ""
	m.Boot = &vmm.Boot{Kernel: "/node/vmlinuz", Initrd: "/node/initrd.img", Cmdline: "quiet rdinit=/init"}
	return m
}

func TestArgumentsAreAsRecorded(t *testing.T) {
	alone := bootedMachine()
	alone.MAC, alone.Disks = "", nil
	tcg := profile{binary: testBinary, accel: AccelTCG, tbSizeMiB: 32, tscKHz: 2000000}
	kvm := profile{binary: testBinary, accel: AccelKVM, tbSizeMiB: 32}
	tests := map[string]struct {
		p profile
		m vmm.Machine
	}{
		"boot-tcg":    {tcg, bootedMachine()},
		"boot-kvm":    {kvm, bootedMachine()},
		"boot-alone":  {tcg, alone},
		"restore-tcg": {tcg, restoredMachine()},
		"restore-kvm": {kvm, restoredMachine()},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got := printArgs(args(test.p, "sbx-1", test.m))
			golden := filepath.Join("testdata", name+".args")
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("arguments changed (-want +got); memory images of before may not load:\n%s", diff)
			}
		})
	}
}

// printArgs puts every option on a line of its own.
func printArgs(args []string) string {
	var b strings.Builder
	for i, a := range args {
		switch {
		case i == 0:
		case strings.HasPrefix(a, "-"):
			b.WriteByte('\n')
		default:
			b.WriteByte(' ')
		}
		b.WriteString(a)
	}
	return b.String() + "\n"
}

// A device state fits only where the devices are the same.
func TestBootAndRestoreHaveTheSameDevices(t *testing.T) {
	p := profile{binary: testBinary, accel: AccelTCG, tbSizeMiB: 32}
	devices := func(m vmm.Machine) []string {
		var found []string
		for _, a := range args(p, "sbx-1", m) {
			if strings.HasPrefix(a, "virtio-") || strings.HasPrefix(a, machineType) {
				found = append(found, a)
			}
		}
		return found
	}
	if diff := cmp.Diff(devices(bootedMachine()), devices(restoredMachine())); diff != "" {
		t.Errorf("devices of boot (-) and restore (+):\n%s", diff)
	}
}

func TestNoTwoFilesShareANumberOrPassTheLaunchersTable(t *testing.T) {
	m := bootedMachine()
	m.Disks = make([]vmm.Disk, maxDisks)
	n := numberFDs(profile{accel: AccelKVM}, m)
	all := append([]int{n.kernel, n.initrd, n.kvm}, n.disks...)
	for i, fd := range all {
		if fd < fdFirst || fd >= 64 || slices.Contains(all[:i], fd) {
			t.Errorf("descriptor %d of %v", fd, all)
		}
	}
}

func TestLimitsGrowWithTheMachine(t *testing.T) {
	p := profile{accel: AccelTCG, tbSizeMiB: 32}
	small, large := limitsFor(p, cube.Resources{VCPUs: 1, MemoryMiB: 256}), limitsFor(p, cube.Resources{VCPUs: 4, MemoryMiB: 1024})
	if small.MemoryBytes <= 256<<20 || large.MemoryBytes <= small.MemoryBytes+768<<20 {
		t.Errorf("memory limits %d and %d", small.MemoryBytes, large.MemoryBytes)
	}
	if small.MilliCPUs <= 1000 || large.MilliCPUs <= 4000 || large.PIDs <= small.PIDs {
		t.Errorf("limits %+v and %+v", small, large)
	}
	if kvm := limitsFor(profile{accel: AccelKVM, tbSizeMiB: 32}, cube.Resources{VCPUs: 1, MemoryMiB: 256}); kvm.MemoryBytes >= small.MemoryBytes {
		t.Errorf("kvm gets %d bytes, tcg %d: only tcg translates code", kvm.MemoryBytes, small.MemoryBytes)
	}
}

func TestImpossibleMachinesAreRefused(t *testing.T) {
	tap, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer tap.Close()
	tests := map[string]func(m *vmm.Machine){
		"no vCPU":          func(m *vmm.Machine) { m.VCPUs = 0 },
		"no memory":        func(m *vmm.Machine) { m.MemoryMiB = 0 },
		"boot and restore": func(m *vmm.Machine) { m.StatePath = "/pool/state" },
		"neither":          func(m *vmm.Machine) { m.Boot = nil },
		"tap without MAC":  func(m *vmm.Machine) { m.MAC = "" },
		"options in MAC":   func(m *vmm.Machine) { m.MAC = "x,bus=y" },
		"too many disks":   func(m *vmm.Machine) { m.Disks = make([]vmm.Disk, maxDisks+1) },
	}
	if err := checkMachine(bootedMachine(), tap); err != nil {
		t.Fatalf("the unchanged machine: %v", err)
	}
	for name, change := range tests {
		m := bootedMachine()
		change(&m)
		if err := checkMachine(m, tap); cube.CodeOf(err) != cube.CodeInvalid {
			t.Errorf("%s: %v; want Invalid", name, err)
		}
	}
}

func TestOwnersThatCouldEscapeAreRefused(t *testing.T) {
	d := &Driver{runDir: "/run/x"}
	for _, owner := range []string{"", ".", "../x", "a/b", "a,b", "a b", "-a", "a\n", strings.Repeat("a", 200)} {
		if err := d.checkOwner(owner); cube.CodeOf(err) != cube.CodeInvalid {
			t.Errorf("owner %q: %v; want Invalid", owner, err)
		}
	}
	if err := d.checkOwner("sbx-1.clone_2"); err != nil {
		t.Error(err)
	}
}
