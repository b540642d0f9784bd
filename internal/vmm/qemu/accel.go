package qemu

import (
	"fmt"
	"os"
	"slices"
	"strings"

	cube "github.com/cubesandbox/cubelet"
)

// The accelerators, and the request to choose one.
const (
	AccelAuto = "auto"
	AccelTCG  = "tcg"
	AccelKVM  = "kvm"
)

// kvmDevice is the kernel's door to hardware virtualisation.
const kvmDevice = "/dev/kvm"

// ProbeAccel chooses the accelerator for this host; see ChooseAccel.
func ProbeAccel(requested string) (accel, reason string, err error) {
	cpuinfo, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "", "", fmt.Errorf("choose the accelerator: %w", err)
	}
	f, err := os.OpenFile(kvmDevice, os.O_RDWR, 0)
	if err == nil {
		_ = f.Close()
	}
	return ChooseAccel(requested, string(cpuinfo), err == nil)
}

// ChooseAccel returns the accelerator to use and one sentence why. devKVM tells whether
// /dev/kvm can be opened. A working /dev/kvm alone proves nothing: a host that is
// itself a paravirtualised guest has it, and no stock guest boots there; so "auto" also
// wants the processor to show vmx or svm. Codes: Invalid, FailedPrecondition.
func ChooseAccel(requested, cpuinfo string, devKVM bool) (accel, reason string, err error) {
	flag := virtualizationFlag(cpuinfo)
	switch requested {
	case AccelTCG:
		return AccelTCG, "tcg is configured", nil
	case AccelKVM:
		if !devKVM {
			return "", "", cube.Errorf(cube.CodeFailedPrecondition, "accelerator kvm is configured and %s cannot be opened", kvmDevice).
				WithHint("Load the module kvm_intel or kvm_amd, or configure the accelerator auto or tcg.")
		}
		if flag == "" {
			return AccelKVM, "kvm is configured, though the processor shows neither vmx nor svm", nil
		}
		return AccelKVM, "kvm is configured", nil
	case AccelAuto, "":
	default:
		return "", "", cube.InvalidField("accelerator", "%q is not one of auto, tcg, kvm", requested)
	}
	switch {
	case devKVM && flag != "":
		return AccelKVM, fmt.Sprintf("%s opens and the processor has %s", kvmDevice, flag), nil
	case devKVM:
		return AccelTCG, fmt.Sprintf("%s opens, but the processor shows neither vmx nor svm: no stock guest runs on such a host", kvmDevice), nil
	default:
		return AccelTCG, kvmDevice + " cannot be opened", nil
	}
}

// virtualizationFlag returns vmx or svm when the processor has it, else "".
func virtualizationFlag(cpuinfo string) string {
	for line := range strings.Lines(cpuinfo) {
		key, value, _ := strings.Cut(line, ":")
		if strings.TrimSpace(key) != "flags" {
			continue
		}
		flags := strings.Fields(value)
		for _, want := range [...]string{"vmx", "svm"} {
			if slices.Contains(flags, want) {
				return want
			}
		}
	}
	return ""
}

// processorName returns the model name of the first processor.
func processorName(cpuinfo string) string {
	for line := range strings.Lines(cpuinfo) {
		key, value, _ := strings.Cut(line, ":")
		if strings.TrimSpace(key) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return "unknown"
}
