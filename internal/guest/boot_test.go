package guest

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/guestapi"
	"github.com/cubesandbox/cubelet/internal/initramfs"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

// guestRun runs the test program in a virtual machine and returns what it printed.
func guestRun(t *testing.T, v *vm, token string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	out, errOut, code, err := newClient().Run(ctx, v.dial, token, cube.ExecSpec{Args: append([]string{"/testguest"}, args...)})
	if err != nil || code != 0 {
		t.Fatalf("testguest %v: exit %d, %q, %v", args, code, errOut, err)
	}
	return strings.TrimSpace(string(out))
}

func guestInit(t *testing.T, v *vm, in guestapi.Init) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 120*time.Second)
	defer cancel()
	if err := newClient().Init(ctx, v.dial, in); err != nil {
		t.Fatal(err)
	}
}

// One machine boots an image that holds a single program and nothing else, is saved, and
// wakes up twice as two sandboxes that share no identity.
func TestAgentIsPID1OfRealGuests(t *testing.T) {
	im := buildImages(t)
	tpl := startVM(t, im, vmOptions{
		name: "tpl", layer: im.layer, memory: filepath.Join(im.dir, "memory"),
		cmdline: initramfs.Cmdline("cube.address=10.0.2.15/24", "cube.gateway=10.0.2.2"),
	})
	tpl.consoleOnFailure(t)
	guestInit(t, tpl, guestapi.Init{SandboxID: "tpl-build", Entrypoint: []string{"/testguest"}, Cmd: []string{"echo", "image"}})
	checkBooted(t, tpl)
	state := filepath.Join(im.dir, "state")
	tpl.save(t, state)
	tpl.stop()

	seen := map[string]string{}
	for i := range 2 {
		name := fmt.Sprintf("sb-%d", i)
		layer := filepath.Join(im.dir, name+".layer")
		command(t, "cp", "--sparse=always", im.layer, layer)
		v := startVM(t, im, vmOptions{name: name, layer: layer, memory: filepath.Join(im.dir, "memory"), clone: true})
		v.consoleOnFailure(t)
		v.restore(t, state)
		for key, value := range checkClone(t, v, name) {
			if seen[key] == value {
				t.Errorf("two sandboxes have the %s %q", key, value)
			}
			seen[key] = value
		}
		shutDown(t, v, layer)
	}
}

// checkBooted looks at a machine that has just booted.
func checkBooted(t *testing.T, v *vm) {
	t.Helper()
	mounts := guestRun(t, v, "", "cat", "/proc/mounts")
	for _, want := range []string{"overlay / ", "devtmpfs /dev ", "proc /proc ", "sysfs /sys ", "devpts /dev/pts ", "shm /dev/shm ", "mqueue /dev/mqueue ", "cgroup2 /sys/fs/cgroup ", "tmpfs /run ", "tmpfs /etc/hosts "} {
		if !strings.Contains(mounts, want) {
			t.Errorf("no mount %q in\n%s", want, mounts)
		}
	}
	if got := guestRun(t, v, "", "cat", "/proc/self/cgroup"); !regexp.MustCompile(`^0::/user/\d+$`).MatchString(got) {
		t.Errorf("a program is in the group %q", got)
	}
	if got := guestRun(t, v, "", "cat", "/proc/self/oom_score_adj"); got != "0" {
		t.Errorf("a program has the oom_score_adj %s", got)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	if out, _, _, err := newClient().Run(ctx, v.dial, "", cube.ExecSpec{}); err != nil || string(out) != "image\n" {
		t.Errorf("the image's command: %q, %v", out, err)
	}
	guestRun(t, v, "", "write", "/tmp/file", "x") // the image has no /tmp
	guestRun(t, v, "", "orphans")
	testenv.Eventually(t, 60*time.Second, func() error {
		if n := guestRun(t, v, "", "zombies"); n != "0" {
			return fmt.Errorf("%s zombies", n)
		}
		return nil
	})
}

// checkClone makes a restored machine a sandbox and returns what no other may share.
func checkClone(t *testing.T, v *vm, name string) map[string]string {
	t.Helper()
	machineID := fmt.Sprintf("%032x", len(name)*1000+int(name[len(name)-1]))
	// An hour after the image was saved.
	now := time.Now().Add(time.Hour)
	guestInit(t, v, guestapi.Init{
		SandboxID: name, AccessToken: "token-" + name, Hostname: name, MachineID: machineID, Time: now,
		Entropy: []byte(strings.Repeat(name, 10)), Env: map[string]string{"WHO": name}, Nameservers: []string{"10.0.2.3"},
	})
	token := "token-" + name
	for path, want := range map[string]string{
		"/etc/hostname": name, "/etc/machine-id": machineID, "/etc/resolv.conf": "nameserver 10.0.2.3",
	} {
		if got := guestRun(t, v, token, "cat", path); got != want {
			t.Errorf("%s holds %q, want %q", path, got, want)
		}
	}
	if got := guestRun(t, v, token, "cat", "/etc/hosts"); !strings.Contains(got, "127.0.1.1\t"+name) {
		t.Errorf("hosts: %q", got)
	}
	if got := guestRun(t, v, token, "hostname"); got != name {
		t.Errorf("host name %q", got)
	}
	if env := guestRun(t, v, token, "env"); !strings.Contains(env, "WHO="+name) || !strings.Contains(env, "E2B_SANDBOX_ID="+name) {
		t.Errorf("variables: %q", env)
	}
	millis, err := strconv.ParseInt(guestRun(t, v, token, "time"), 10, 64)
	if err != nil || time.UnixMilli(millis).Before(now) || time.UnixMilli(millis).After(now.Add(time.Minute)) {
		t.Errorf("the clock shows %v, want %v, %v", time.UnixMilli(millis), now, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if _, err := newClient().Exec(ctx, v.dial, "", cube.ExecSpec{Args: []string{"/testguest"}}); cube.CodeOf(err) != cube.CodePermissionDenied {
		t.Errorf("without the token: %v", err)
	}
	return map[string]string{"random number": guestRun(t, v, token, "random"), "machine id": machineID}
}

// shutDown powers the guest off in the orderly way and looks at the disk it leaves.
func shutDown(t *testing.T, v *vm, layer string) {
	t.Helper()
	name := strings.TrimSuffix(filepath.Base(layer), ".layer")
	guestRun(t, v, "token-"+name, "write", "/root-file", "written by "+name)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	waiting, err := newClient().Exec(ctx, v.dial, "token-"+name, cube.ExecSpec{Args: []string{"/testguest", "wait"}})
	if err != nil {
		t.Fatal(err)
	}
	defer waiting.Close()
	if err := newClient().Shutdown(ctx, v.dial, "token-"+name); err != nil {
		t.Fatal(err)
	}
	select {
	case <-v.exited:
	case <-ctx.Done():
		t.Fatal("the machine does not power off")
	}
	if out, err := exec.Command("dumpe2fs", "-h", layer).CombinedOutput(); err != nil || strings.Contains(string(out), "needs_recovery") {
		t.Errorf("the layer is not clean: %v\n%s", err, out)
	}
	if out, err := exec.Command("e2fsck", "-fn", layer).CombinedOutput(); err != nil {
		t.Errorf("e2fsck: %v\n%s", err, out)
	}
	out, err := exec.Command("debugfs", "-R", "cat /upper/root-file", layer).Output()
	if err != nil || string(out) != "written by "+name {
		t.Errorf("the file on the layer holds %q, %v", out, err)
	}
}
