package guest

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/guestapi"
	"github.com/cubesandbox/cubelet/internal/initramfs"
)

func TestExpRestore(t *testing.T) {
	im := buildImages(t)
	tpl := startVM(t, im, vmOptions{name: "tpl", layer: im.layer, memory: im.dir + "/mem", cmdline: initramfs.Cmdline("cube.address=10.0.2.15/24", "cube.gateway=10.0.2.2")})
	tpl.consoleOnFailure(t)
	c := New(slog.Default())
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	at := time.Now()
	if err := c.Init(ctx, tpl.dial, guestapi.Init{SandboxID: "tpl"}); err != nil {
		t.Fatal(err)
	}
	t.Log("cold boot to init", time.Since(at))
	for range 2 {
		at = time.Now()
		o, e, x, err := c.Run(ctx, tpl.dial, "", cube.ExecSpec{Args: []string{"/testguest", "echo", "hi"}})
		t.Logf("%q %q %d %v %v", o, e, x, err, time.Since(at))
	}
	o, e, x, err := c.Run(ctx, tpl.dial, "", cube.ExecSpec{Args: []string{"/testguest", "cat", "/proc/mounts"}})
	t.Logf("%s %s %d %v", o, e, x, err)
	time.Sleep(500*time.Millisecond)
	tpl.save(t, im.dir+"/state")
	tpl.stop()
	for i := range 5 {
		layer := fmt.Sprintf("%s/layer%d", im.dir, i)
		if out, err := exec.Command("cp", im.layer, layer).CombinedOutput(); err != nil {
			t.Fatal(string(out))
		}
		v := startVM(t, im, vmOptions{name: fmt.Sprint("c", i), layer: layer, memory: im.dir + "/mem", clone: true})
		at := time.Now()
		v.restore(t, im.dir+"/state")
		t1 := time.Since(at)
		c1 := cpuTime(v.cmd.Process.Pid)
		if err := c.Init(ctx, v.dial, guestapi.Init{SandboxID: "sb", TemplateID: "tpl-x", Hostname: "sbx", MachineID: "0123456789abcdef0123456789abcdef", AccessToken: "t", Entropy: make([]byte, 64), Nameservers: []string{"169.254.0.21"}, Env: map[string]string{"PATH": "/bin:/usr/bin", "A": "B"}}); err != nil {
			t.Fatal(err)
		}
		t2 := time.Since(at)
		c2 := cpuTime(v.cmd.Process.Pid)
		s, err := c.Exec(ctx, v.dial, "t", cube.ExecSpec{Args: []string{"/testguest", "echo", "hi"}})
		if err != nil {
			t.Fatal(err)
		}
		t3 := time.Since(at)
		c3 := cpuTime(v.cmd.Process.Pid)
		var t4, c4 time.Duration
		for {
			ev, err := s.Recv()
			if err != nil {
				break
			}
			if ev.Data != nil && t4 == 0 {
				t4 = time.Since(at)
				c4 = cpuTime(v.cmd.Process.Pid)
			}
		}
		c5 := cpuTime(v.cmd.Process.Pid)
		t.Logf("wall: restored %v init %v started %v output %v end %v", t1, t2, t3, t4, time.Since(at))
		t.Logf("cpu: restored %v init +%v started +%v output +%v end +%v = %v", c1, c2-c1, c3-c2, c4-c3, c5-c4, c5-c1)
		s.Close()
		v.stop()
	}
}

func cpuTime(pid int) (sum time.Duration) {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	for _, f := range files {
		b, _ := os.ReadFile(f)
		var n int64
		fmt.Sscan(string(b), &n)
		sum += time.Duration(n)
	}
	return sum.Round(100 * time.Microsecond)
}
