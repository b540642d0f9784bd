package e2e

import (
	"strings"
	"testing"
)

// testDoctor: a host that runs a node is well, and a missing tool is named with a remedy.
func testDoctor(t *testing.T, n *node) {
	type result struct{ Name, Level, Detail, Fix string }
	out, err := n.command("doctor", "-o", "json").Output()
	if err != nil {
		t.Errorf("doctor: %v\n%s", err, out)
	}
	names := map[string]bool{}
	for _, r := range decode[[]result](t, string(out)) {
		names[r.Name] = true
		if r.Level == "fail" {
			t.Errorf("%s: %s", r.Name, r.Detail)
		}
	}
	for _, want := range []string{"qemu", "network", "pool", "accelerator"} {
		if !names[want] {
			t.Errorf("no check of %s in %s", want, out)
		}
	}
	out, err = n.command("doctor", "--qemu", "/nowhere/qemu").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "/nowhere/qemu is not installed") || !strings.Contains(string(out), "what to do") {
		t.Errorf("doctor without QEMU: %v\n%s", err, out)
	}
}
