package qemu

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	cube "github.com/cubesandbox/cubelet"
)

func TestChooseAccelFollowsTheHost(t *testing.T) {
	const intel, amd, none = "flags\t\t: fpu vmx sse\n", "processor: 0\nflags : fpu svm\n", "flags : fpu vmx2 sse\nbugs : vmx\n"
	tests := []struct {
		requested, cpuinfo string
		devKVM             bool
		want, reason       string
		code               cube.Code // of the error when want is empty
	}{
		{"auto", intel, true, "kvm", "has vmx", 0},
		{"", amd, true, "kvm", "has svm", 0},
		{"auto", none, true, "tcg", "neither vmx nor svm", 0},
		{"auto", intel, false, "tcg", "cannot be opened", 0},
		{"auto", "", false, "tcg", "cannot be opened", 0},
		{"tcg", intel, true, "tcg", "configured", 0},
		{"kvm", intel, true, "kvm", "configured", 0},
		{"kvm", none, true, "kvm", "neither", 0},
		{"kvm", intel, false, "", "", cube.CodeFailedPrecondition},
		{"xen", intel, true, "", "", cube.CodeInvalid},
	}
	for _, test := range tests {
		accel, reason, err := ChooseAccel(test.requested, test.cpuinfo, test.devKVM)
		if accel != test.want || !strings.Contains(reason, test.reason) || (err != nil) != (test.want == "") {
			t.Errorf("ChooseAccel(%q, %q, %v) = %q, %q, %v; want %q, …%s…", test.requested, test.cpuinfo, test.devKVM, accel, reason, err, test.want, test.reason)
		}
		if err != nil && cube.CodeOf(err) != test.code {
			t.Errorf("ChooseAccel(%q) = %v; want code %v", test.requested, err, test.code)
		}
	}
}

func TestProbeAccelNamesAReason(t *testing.T) {
	accel, reason, err := ProbeAccel(AccelAuto)
	if err != nil || accel == "" || reason == "" {
		t.Errorf("ProbeAccel = %q, %q, %v", accel, reason, err)
	}
}

func TestParseVersion(t *testing.T) {
	tests := map[string]string{
		"QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2+deb13u1~bpo12+1)\nCopyright (c) 2003\n": "10.0.2",
		"QEMU emulator version 8.2.2 (Debian 1:8.2.2+ds-0ubuntu1)":                                  "8.2.2",
		"QEMU emulator version 9.1.0-rc2":                                                           "9.1.0-rc2",
		"QEMU emulator version ":                                                                    "",
		"QEMU emulator version x.y":                                                                 "",
		"busybox":                                                                                   "",
		"":                                                                                          "",
	}
	for out, want := range tests {
		if got, err := parseVersion(out); got != want || (err != nil) != (want == "") {
			t.Errorf("parseVersion(%q) = %q, %v; want %q", out, got, err, want)
		}
	}
}

func TestOlderComparesNumbers(t *testing.T) {
	for _, test := range []struct {
		a, b string
		want bool
	}{
		{"7.2.0", "8.2", true},
		{"8.1.9", "8.2", true},
		{"8.2", "8.2", false},
		{"8.2.0", "8.2", false},
		{"10.0.2", "8.2", false},
		{"9.1.0-rc2", "8.2", false},
		{"8", "8.2", true},
	} {
		if got := older(test.a, test.b); got != test.want {
			t.Errorf("older(%q, %q) = %v", test.a, test.b, got)
		}
	}
}

func TestNewRefusesAMissingOrOldQEMU(t *testing.T) {
	dir := t.TempDir()
	script := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o755); err != nil {
			t.Fatal(err)
		}
		return path
	}
	tests := map[string]struct{ binary, text string }{
		"missing": {filepath.Join(dir, "none"), "no such file"},
		"old":     {script("old", "echo QEMU emulator version 7.2.9\n"), "QEMU 7.2.9, and 8.2 is the oldest"},
		"failing": {script("failing", "echo broken library >&2; exit 127\n"), "broken library"},
		"other":   {script("other", "echo hello\n"), "no version in"},
	}
	for name, test := range tests {
		_, err := New(Config{Binary: test.binary, Accel: AccelTCG})
		if err == nil || cube.CodeOf(err) != cube.CodeFailedPrecondition || !strings.Contains(err.Error(), test.text) {
			t.Errorf("%s: %v; want FailedPrecondition with %q", name, err, test.text)
		}
	}
	if _, err := New(Config{Binary: testBinary, Accel: "hax"}); cube.CodeOf(err) != cube.CodeInvalid {
		t.Errorf("unknown accelerator: %v; want Invalid", err)
	}
}

func TestMachineInfoNamesWhatAnImageDependsOn(t *testing.T) {
	d, err := New(Config{Binary: testBinary, Accel: AccelTCG})
	if err != nil {
		t.Fatal(err)
	}
	info, err := d.MachineInfo(context.Background())
	if err != nil || info.QEMU == "" || info.MachineType != "microvm" || info.CPUModel != "max" || info.Accelerator != "tcg" {
		t.Errorf("MachineInfo = %+v, %v", info, err)
	}
}

func TestTheMeasuredTSCFrequencyIsStable(t *testing.T) {
	a, b := measureTSC(), measureTSC()
	if a < 100_000 || a > 10_000_000 || abs(a-b) > a/1000 {
		t.Errorf("measured %d and %d kHz", a, b)
	}
}

func abs(n int) int { return max(n, -n) }
