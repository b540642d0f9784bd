package e2e

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"testing"
)

// testJail looks at a running VMM from the host: it is a process without rights.
func testJail(t *testing.T, n *node) {
	a, b := n.create("--template-id", "base"), n.create("--template-id", "base")
	pa, pb := n.sandbox(a).Pid, n.sandbox(b).Pid
	sa, sb := procStatus(t, pa), procStatus(t, pb)
	for _, key := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"} {
		if sa[key] != "0000000000000000" {
			t.Errorf("%s = %s", key, sa[key])
		}
	}
	if sa["NoNewPrivs"] != "1" || sa["Seccomp"] != "2" {
		t.Errorf("NoNewPrivs = %s, Seccomp = %s", sa["NoNewPrivs"], sa["Seccomp"])
	}
	uid := strings.Fields(sa["Uid"])[0]
	if uid == "0" || uid == strings.Fields(sb["Uid"])[0] {
		t.Errorf("uids %q and %q; want two of their own", sa["Uid"], sb["Uid"])
	}
	for _, ns := range []string{"pid", "ipc", "uts", "mnt", "net"} {
		mine, err := os.Readlink("/proc/self/ns/" + ns)
		if err != nil {
			t.Fatal(err)
		}
		first, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pa, ns))
		if err != nil {
			t.Fatal(err)
		}
		second, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pb, ns))
		if err != nil {
			t.Fatal(err)
		}
		if first == mine || first == second {
			t.Errorf("%s namespace is shared: host %s, VMMs %s and %s", ns, mine, first, second)
		}
	}
	// Its network namespace has no link but loopback.
	f, err := os.Open(fmt.Sprintf("/proc/%d/net/dev", pa))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if name, _, ok := strings.Cut(s.Text(), ":"); ok && strings.TrimSpace(name) != "lo" {
			t.Errorf("the VMM's namespace has the link %s", name)
		}
	}
	limits, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", pa))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(limits)) {
		if f := strings.Fields(line); strings.HasPrefix(line, "Max core file size") && (f[4] != "0" || f[5] != "0") {
			t.Errorf("core dumps are on: %s", line)
		}
	}
	n.must("sandbox", "delete", a, b)
}

func procStatus(t *testing.T, pid int64) map[string]string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	m := map[string]string{}
	for line := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(line, ":"); ok {
			m[k] = strings.TrimSpace(v)
		}
	}
	return m
}
