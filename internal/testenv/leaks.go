package testenv

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// leakGrace is how long things that go away on their own (a process that was just
// killed, a loop device with autoclear) may take before they count as left behind.
const leakGrace = 5 * time.Second

// Leaks checks at the end of the test that nothing of it stays on the machine:
//   - processes that descend from the test, or that name one of its roots (TempRoot) in
//     their arguments, environment, working directory, root or open files;
//   - mounts (network namespaces among them) and loop devices of its roots.
//
// TempRoot looks for the rest. Other tests run on the machine at the same time, so what
// cannot be told to be of this test is not counted. Call it first: it then runs after
// every other cleanup.
func Leaks(t testing.TB) {
	t.Helper()
	before := processes(rootPrefix(t))
	t.Cleanup(func() {
		var left []string
		_ = poll(leakGrace, func() error {
			left = leaked(rootPrefix(t), before)
			if len(left) > 0 {
				return fmt.Errorf("%d left", len(left))
			}
			return nil
		})
		if len(left) > 0 {
			t.Errorf("the test leaves behind:\n\t%s", strings.Join(left, "\n\t"))
		}
	})
}

func leaked(prefix string, before map[string]string) []string {
	left := looseEnds(prefix)
	now := processes(prefix)
	for _, id := range slices.Sorted(maps.Keys(now)) {
		if _, old := before[id]; !old {
			left = append(left, "process "+now[id])
		}
	}
	return left
}

// processes returns what belongs to this test, described, by PID and start time.
func processes(prefix string) map[string]string {
	found := map[string]string{}
	children := map[int][]int{}
	all := map[int]procStat{}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return found
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if st, ok := readStat(pid); ok {
			all[pid] = st
			children[st.parent] = append(children[st.parent], pid)
		}
	}
	add := func(pid int, why string) {
		st := all[pid]
		found[fmt.Sprintf("%d@%s", pid, st.start)] = fmt.Sprintf("%d (%s, %s): %s", pid, st.state, why, cmdline(pid, st))
	}
	var walk func(pid int)
	walk = func(pid int) {
		for _, c := range children[pid] {
			add(c, "descendant")
			walk(c)
		}
	}
	self := os.Getpid()
	walk(self)
	for pid := range all {
		if pid == self {
			continue
		}
		if where := names(pid, prefix); where != "" {
			add(pid, "by its "+where)
		}
	}
	return found
}

// names tells in which property process pid names a path that begins with prefix.
func names(pid int, prefix string) string {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	for _, f := range []string{"cmdline", "environ"} {
		b, err := os.ReadFile(filepath.Join(dir, f))
		if err == nil && bytes.Contains(b, []byte(prefix)) {
			return f
		}
	}
	for _, l := range []string{"cwd", "root", "exe"} {
		if p, err := os.Readlink(filepath.Join(dir, l)); err == nil && strings.HasPrefix(p, prefix) {
			return l
		}
	}
	fds, err := os.ReadDir(filepath.Join(dir, "fd"))
	if err != nil {
		return ""
	}
	for _, fd := range fds {
		if p, err := os.Readlink(filepath.Join(dir, "fd", fd.Name())); err == nil && strings.HasPrefix(p, prefix) {
			return "open file " + p
		}
	}
	return ""
}

type procStat struct {
	comm, state, start string
	parent             int
}

// readStat parses /proc/PID/stat; the command's name may hold spaces and brackets.
func readStat(pid int) (procStat, bool) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return procStat{}, false
	}
	open, end := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')')
	if open < 0 || end < open {
		return procStat{}, false
	}
	f := strings.Fields(string(b[end+1:]))
	if len(f) < 20 {
		return procStat{}, false
	}
	parent, err := strconv.Atoi(f[1])
	if err != nil {
		return procStat{}, false
	}
	return procStat{comm: string(b[open+1 : end]), state: f[0], parent: parent, start: f[19]}, true
}

func cmdline(pid int, st procStat) string {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline"))
	if err != nil || len(b) == 0 {
		return st.comm
	}
	return strings.TrimSpace(string(bytes.ReplaceAll(b, []byte{0}, []byte{' '})))
}

// mountsBelow returns the mount points that begin with prefix, in mount order.
func mountsBelow(prefix string) []string {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil
	}
	var points []string
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) > 4 && strings.HasPrefix(f[4], prefix) {
			points = append(points, strings.NewReplacer(`\040`, " ", `\011`, "\t", `\134`, `\`).Replace(f[4]))
		}
	}
	return points
}

// loopsBelow returns the loop devices whose backing file begins with prefix.
func loopsBelow(prefix string) map[string]string {
	loops := map[string]string{}
	paths, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return loops
	}
	for _, p := range paths {
		b, err := os.ReadFile(p)
		if err != nil {
			continue // detached meanwhile
		}
		if file := strings.TrimSpace(string(b)); strings.HasPrefix(file, prefix) {
			loops["/dev/"+strings.Split(p, "/")[3]] = file
		}
	}
	return loops
}
