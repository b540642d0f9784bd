package e2e

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

func testMainPath(t *testing.T, n *node) {
	id := n.create("--template-id", "base")
	sb := n.sandbox(id)
	if sb.Phase != cubev1.Phase_PHASE_RUNNING || !alive(sb.Pid) {
		t.Errorf("sandbox = %v", sb)
	}
	// A kernel of its own, and Python runs in it.
	release, err := os.ReadFile(filepath.Join(n.kernel, "release"))
	if err != nil {
		t.Fatal(err)
	}
	if got := n.exec(id, "uname", "-r"); got != strings.TrimSpace(string(release)) {
		t.Errorf("guest kernel = %q; want %q", got, release)
	}
	if got := n.exec(id, "python3", "-c", "print(sum(range(101)))"); got != "5050" {
		t.Errorf("python = %q", got)
	}
	// The default user is the image's, with sudo.
	if got := n.exec(id, "sh", "-c", "id -un; pwd; sudo id -un"); got != "user\n/home/user\nroot" {
		t.Errorf("users = %q", got)
	}
	if got := n.must("sandbox", "list", "-q"); got != id {
		t.Errorf("list = %q", got)
	}
	n.must("sandbox", "delete", id[:8])
	if alive(sb.Pid) {
		t.Errorf("process %d lives on after the delete", sb.Pid)
	}
	if _, err := os.Stat(n.root + "/pool/sandboxes/" + id); err == nil {
		t.Error("the sandbox's directory is still there")
	}
	if r := n.cli("", "sandbox", "delete", id); r.code == 0 {
		t.Error("second delete succeeded")
	}
	n.must("sandbox", "delete", "--ignore-missing", id)
}

func testBadRequests(t *testing.T, n *node) {
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"unknown template":   {[]string{"--template-id", "tpl-99999"}, "tpl-99999"},
		"host mount":         {[]string{"--template-id", "base", "--metadata", `{"host-mount":[{"hostPath":"/data/models","containerPath":"/mnt/models"}]}`, "--network", `{"cidr":"192.168.10.0/24"}`}, "host-mount"},
		"metadata JSON":      {[]string{"--template-id", "base", "--metadata", `{"a":`}, "metadata"},
		"mount field":        {[]string{"--template-id", "base", "--metadata", `{"host-mount":[{"hostPath":"/a","containerPath":"/b","mode":"rw"}]}`}, "mode"},
		"network field":      {[]string{"--template-id", "base", "--network", `{"cidrs":"192.168.10.0/24"}`}, "cidrs"},
		"network value":      {[]string{"--template-id", "base", "--network", `{"cidr":"192.168.10.0/33"}`}, "cidr"},
		"impossible memory":  {[]string{"--template-id", "base", "--memory", "1TiB"}, "memory"},
		"too little memory":  {[]string{"--template-id", "base", "--memory", "1MiB"}, "memory"},
		"impossible CPUs":    {[]string{"--template-id", "base", "--cpus", "1000"}, "cpu"},
		"no template at all": {nil, "template"},
	} {
		r := n.cli("", append([]string{"sandbox", "create"}, c.args...)...)
		if r.code == 0 || !strings.Contains(strings.ToLower(r.stderr), c.want) {
			t.Errorf("%s: exit %d, want a mention of %q\n%s%s", name, r.code, c.want, r.stdout, r.stderr)
		}
	}
}

func testExec(t *testing.T, n *node) {
	id := n.create("--template-id", "base")
	defer n.must("sandbox", "delete", id)
	if r := n.cli("", "sandbox", "exec", id, "--", "sh", "-c", "echo out; echo err >&2; exit 7"); r.code != 7 || r.stdout != "out\n" || r.stderr != "err\n" {
		t.Errorf("exit code and streams = %+v", r)
	}
	if r := n.cli("some input\n", "sandbox", "exec", "-i", id, "--", "tr", "a-z", "A-Z"); r.code != 0 || r.stdout != "SOME INPUT\n" {
		t.Errorf("stdin = %+v", r)
	}
	if r := n.cli("", "sandbox", "exec", id, "--", "cat"); r.code != 0 || r.stdout != "" {
		t.Errorf("without -i the input is empty: %+v", r)
	}
	if r := n.cli("", "sandbox", "exec", id, "--", "no-such-program"); r.code == 0 || !strings.Contains(r.stderr, "no-such-program") {
		t.Errorf("unknown program = %+v", r)
	}
	if r := n.cli("", "sandbox", "exec", "--user", "nobody-here", id, "--", "true"); r.code == 0 || !strings.Contains(r.stderr, "nobody-here") {
		t.Errorf("unknown user = %+v", r)
	}
	if got := n.must("sandbox", "exec", "--user", "root", "--cwd", "/etc", "--env", "X=y z", id, "--", "sh", "-c", "id -u; pwd; echo $X"); got != "0\n/etc\ny z" {
		t.Errorf("user, cwd and env = %q", got)
	}
	// facts: "A grandchild holds stdout: the call never returns."
	begin := time.Now()
	if got := n.exec(id, "sh", "-c", "setsid sleep 300 & echo done"); got != "done" || time.Since(begin) > 30*time.Second {
		t.Errorf("grandchild holds stdout: %q after %v", got, time.Since(begin))
	}
	// facts: "setsid escapes the kill": the deadline ends all of it.
	if r := n.cli("", "sandbox", "exec", "--timeout", "2s", id, "--", "sh", "-c", "setsid sleep 4321 & sleep 4321"); r.code == 0 {
		t.Errorf("deadline = %+v", r)
	}
	testenv.Eventually(t, 20*time.Second, func() error {
		if r := n.cli("", "sandbox", "exec", id, "--", "pgrep", "-f", "sleep 4321"); r.code != 1 {
			return fmt.Errorf("pgrep = %+v", r)
		}
		return nil
	})
	// facts: "PID 1 does not reap: hundreds of zombies".
	n.exec(id, "sh", "-c", "for i in $(seq 50); do (sh -c 'sleep 0.01 &' ) ; done")
	testenv.Eventually(t, 20*time.Second, func() error {
		if got := n.exec(id, "sh", "-c", "ps -eo stat= | grep -c '^Z' || true"); got != "0" {
			return fmt.Errorf("%s zombies", got)
		}
		return nil
	})
	if got := n.must("sandbox", "exec", "-t", id, "--", "sh", "-c", "tty && stty size"); !strings.Contains(got, "/dev/pts/") {
		t.Errorf("terminal = %q", got)
	}
}

func testCopy(t *testing.T, n *node) {
	id := n.create("--template-id", "base")
	defer n.must("sandbox", "delete", id)
	dir := t.TempDir()
	data := make([]byte, 96<<20) // facts: "Uploads over some size 'succeed' and are absent"
	if _, err := rand.Read(data); err != nil {
		t.Fatal(err)
	}
	big := filepath.Join(dir, "big")
	if err := os.WriteFile(big, data, 0o640); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(data)
	n.must("sandbox", "cp", big, id+":/tmp/big")
	if got := n.exec(id, "sha256sum", "/tmp/big"); !strings.HasPrefix(got, hex.EncodeToString(sum[:])) {
		t.Errorf("digest in the guest = %s", got)
	}
	n.must("sandbox", "cp", id+":/tmp/big", filepath.Join(dir, "back"))
	back, err := os.ReadFile(filepath.Join(dir, "back"))
	if err != nil || sha256.Sum256(back) != sum {
		t.Errorf("the file that came back differs (%d bytes, %v)", len(back), err)
	}
	tree := filepath.Join(dir, "tree")
	if err := os.MkdirAll(filepath.Join(tree, "a", "empty"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(tree, "a", "f"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	n.must("sandbox", "cp", tree, id+":/tmp/tree")
	if got := n.exec(id, "find", "/tmp/tree", "-mindepth", "1", "-printf", "%y %P\n"); !strings.Contains(got, "f a/f") || !strings.Contains(got, "d a/empty") {
		t.Errorf("tree in the guest:\n%s", got)
	}
	if r := n.cli("", "sandbox", "cp", id+":/no/such/file", dir); r.code == 0 || !strings.Contains(r.stderr, "/no/such/file") {
		t.Errorf("copy of a missing file = %+v", r)
	}
}

// testIdentity proves that clones of one memory image share nothing that must differ.
func testIdentity(t *testing.T, n *node) {
	const count = 4
	ask := "cat /proc/sys/kernel/random/uuid /etc/machine-id; hostname; python3 -c 'import secrets; print(secrets.token_hex())'; date +%s"
	seen := map[string]bool{}
	for range count {
		id := n.create("--template-id", "base")
		lines := strings.Split(n.exec(id, "sh", "-c", ask), "\n")
		if len(lines) != 5 {
			t.Fatalf("answer = %q", lines)
		}
		for _, l := range lines[:4] {
			if seen[l] || l == "" {
				t.Errorf("%q was seen before", l)
			}
			seen[l] = true
		}
		if lines[2] != id {
			t.Errorf("host name = %q", lines[2])
		}
		clock, err := strconv.ParseInt(lines[4], 10, 64)
		if off := time.Now().Unix() - clock; err != nil || off < -1 || off > 3 {
			t.Errorf("the guest's clock is %d s behind (%v)", off, err)
		}
		n.must("sandbox", "delete", id)
	}
}

func testTimeToLive(t *testing.T, n *node) {
	id := n.create("--template-id", "base", "--timeout", "3s")
	testenv.Eventually(t, 30*time.Second, func() error {
		if ids := n.must("sandbox", "list", "-q"); ids != "" {
			return fmt.Errorf("%s lives", ids)
		}
		return nil
	})
	if r := n.cli("", "sandbox", "inspect", id); r.code == 0 {
		t.Error("the expired sandbox can be inspected")
	}
}

func testOtherSize(t *testing.T, n *node) {
	var wg sync.WaitGroup
	ids := make([]string, 2)
	for i := range ids { // the second waits for the memory image that the first makes
		wg.Go(func() {
			if r := n.cli("", "sandbox", "create", "-q", "--template-id", "base", "--cpus", "2", "--memory", "384MiB"); r.code != 0 {
				t.Errorf("create: %+v", r)
			} else {
				ids[i] = strings.TrimSpace(r.stdout)
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	for _, id := range ids {
		if got := n.exec(id, "nproc"); got != "2" {
			t.Errorf("nproc = %s", got)
		}
		kib, err := strconv.Atoi(n.exec(id, "awk", "/MemTotal/{print $2}", "/proc/meminfo"))
		if err != nil || kib > 384<<10 || kib < 300<<10 {
			t.Errorf("memory = %d KiB, %v", kib, err)
		}
		n.must("sandbox", "delete", id)
	}
	sizes := decode[struct{ Sizes []map[string]any }](t, n.must("template", "inspect", "base", "-o", "json")).Sizes
	if len(sizes) != 2 {
		t.Errorf("sizes = %v; want 2", sizes)
	}
}

func testIdempotencyKey(t *testing.T, n *node) {
	a := n.create("--template-id", "base", "--idempotency-key", "key-1")
	if b := n.create("--template-id", "base", "--idempotency-key", "key-1"); b != a {
		t.Errorf("the same request made %s and %s", a, b)
	}
	r := n.cli("", "sandbox", "create", "--template-id", "base", "--idempotency-key", "key-1", "--env", "A=1")
	if r.code == 0 || !strings.Contains(r.stderr, a) {
		t.Errorf("another request with the key = %+v", r)
	}
	n.must("sandbox", "delete", a)
}

func testVMMDies(t *testing.T, n *node) {
	id := n.create("--template-id", "base")
	pid := int(n.sandbox(id).Pid)
	p, err := os.FindProcess(pid)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 10*time.Second, func() error {
		if sb := n.sandbox(id); sb.Phase != cubev1.Phase_PHASE_FAILED || !strings.Contains(sb.Reason, "137") {
			return fmt.Errorf("sandbox = %v", sb)
		}
		return nil
	})
	if r := n.cli("", "sandbox", "exec", id, "--", "true"); r.code == 0 || !strings.Contains(r.stderr, "failed") {
		t.Errorf("exec in a failed sandbox = %+v", r)
	}
	n.must("sandbox", "delete", id)
}

// testKilledDaemon: a daemon killed with -9 loses no sandbox and no running program.
func testKilledDaemon(t *testing.T, n *node) {
	id := n.create("--template-id", "base", "--metadata", `{"owner":"me"}`, "--timeout", "1h")
	before := n.sandbox(id)
	n.exec(id, "sh", "-c", "setsid sh -c 'while :; do date +%s%N > /tmp/tick; sleep 0.2; done' >/dev/null 2>&1 &")
	n.kill()
	// A sandbox that was being created when the daemon died is cleaned up, see the
	// crash tests; here the guest must not notice.
	n.start()
	after := n.sandbox(id)
	if after.Pid != before.Pid || after.Phase != before.Phase || after.Metadata["owner"] != "me" || !after.ExpiresAt.AsTime().Equal(before.ExpiresAt.AsTime()) {
		t.Errorf("before: %v\nafter: %v", before, after)
	}
	first := n.exec(id, "cat", "/tmp/tick")
	testenv.Eventually(t, 20*time.Second, func() error {
		if now := n.exec(id, "cat", "/tmp/tick"); now == first {
			return fmt.Errorf("the guest's program stands still at %s", now)
		}
		return nil
	})
	other := n.create("--template-id", "base")
	if got := n.exec(other, "echo", "new"); got != "new" {
		t.Errorf("exec = %q", got)
	}
	// Die again while creates are under way.
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() { n.cli("", "sandbox", "create", "--template-id", "base") })
	}
	time.AfterFunc(150*time.Millisecond, n.kill)
	wg.Wait()
	n.kill()
	n.start()
	for _, left := range strings.Fields(n.must("sandbox", "list", "-q")) {
		if sb := n.sandbox(left); sb.Phase != cubev1.Phase_PHASE_RUNNING {
			t.Errorf("after the second crash: %v", sb)
		}
		if got := n.exec(left, "echo", "alive"); got != "alive" {
			t.Errorf("exec in %s = %q", left, got)
		}
		n.must("sandbox", "delete", left)
	}
	// An orderly stop is no different.
	id = n.create("--template-id", "base")
	n.stop()
	n.start()
	if got := n.exec(id, "echo", "still here"); got != "still here" {
		t.Errorf("exec = %q", got)
	}
	n.must("sandbox", "delete", id)
}

// testStorm creates far more sandboxes at once than launchers wait: none fails.
func testStorm(t *testing.T, n *node) {
	const count, parallel = 30, 15
	work := make(chan int)
	ids := make(chan string, count)
	var wg sync.WaitGroup
	for range parallel {
		wg.Go(func() {
			for range work {
				r := n.cli("", "sandbox", "create", "-q", "--template-id", "base")
				if r.code != 0 {
					t.Errorf("create: %+v", r)
					continue
				}
				ids <- strings.TrimSpace(r.stdout)
			}
		})
	}
	for i := range count {
		work <- i
	}
	close(work)
	wg.Wait()
	close(ids)
	var all []string
	for id := range ids {
		all = append(all, id)
	}
	if len(all) != count {
		t.Errorf("%d sandboxes; want %d", len(all), count)
	}
	n.must(append([]string{"sandbox", "delete"}, all...)...)
}

func testNetwork(t *testing.T, n *node) {
	world := n.newInternet(t)
	a := n.create("--template-id", "base")
	b := n.create("--template-id", "base", "--network", `{"cidr":"192.168.10.0/24"}`)
	n.exec(b, "sh", "-c", "cd /tmp && setsid python3 -m http.server 8000 >/dev/null 2>&1 &")
	for _, id := range []string{a, b} {
		if got := n.exec(id, "curl", "-s", "--max-time", "20", "http://"+world.address+"/"); got != "the internet" {
			t.Errorf("%s: internet = %q", id, got)
		}
	}
	// No way to another sandbox, nor to the host, nor to a metadata service.
	for what, url := range map[string]string{
		"another sandbox": "http://192.168.10.2:8000/",
		"the host":        "http://" + world.hostAddress + "/",
		"metadata":        "http://169.254.169.254/",
	} {
		if r := n.cli("", "sandbox", "exec", a, "--", "curl", "-s", "--max-time", "3", url); r.code == 0 {
			t.Errorf("a guest reaches %s: %+v", what, r)
		}
	}
	n.must("sandbox", "delete", a, b)
}
