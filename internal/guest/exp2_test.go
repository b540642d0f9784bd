package guest

import (
	"context"
	"fmt"
	"log/slog"
	"os/exec"
	"testing"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/guestapi"
	"github.com/cubesandbox/cubelet/internal/initramfs"
)

func TestExpStages(t *testing.T) {
	im := buildImages(t)
	tpl := startVM(t, im, vmOptions{name: "tpl", layer: im.layer, memory: im.dir + "/mem", cmdline: initramfs.Cmdline("cube.address=10.0.2.15/24", "cube.gateway=10.0.2.2")})
	tpl.consoleOnFailure(t)
	c := New(slog.Default())
	ctx, cancel := context.WithTimeout(t.Context(), 120*time.Second)
	defer cancel()
	if err := c.Init(ctx, tpl.dial, guestapi.Init{SandboxID: "tpl"}); err != nil {
		t.Fatal(err)
	}
	c.Run(ctx, tpl.dial, "", cube.ExecSpec{Args: []string{"/testguest", "echo", "hi"}})
	time.Sleep(1500 * time.Millisecond)
	tpl.save(t, im.dir+"/state")
	tpl.stop()
	base := guestapi.Init{SandboxID: "sb", TemplateID: "tpl-x", AccessToken: "t", Env: map[string]string{"PATH": "/bin:/usr/bin", "A": "B"}}
	withE := base
	withE.Entropy = make([]byte, 64)
	withH := base
	withH.Hostname, withH.MachineID = "sbx", "0123456789abcdef0123456789abcdef"
	withN := base
	withN.Nameservers = []string{"10.0.2.3"}
	ini := func(in guestapi.Init) func(*vm) {
		return func(v *vm) {
			if err := c.Init(ctx, v.dial, in); err != nil {
				t.Fatal(err)
			}
		}
	}
	stages := []struct {
		name string
		do   []func(*vm)
	}{
		{"idle", []func(*vm){func(*vm) { time.Sleep(200 * time.Millisecond) }}},
		{"connect", []func(*vm){func(v *vm) {
			conn, err := v.dial(ctx, 0)
			if err != nil {
				t.Fatal(err)
			}
			time.Sleep(600 * time.Millisecond)
			conn.Close()
		}}},
		{"health,health", []func(*vm){func(v *vm) { c.Health(ctx, v.dial) }, func(v *vm) { c.Health(ctx, v.dial) }}},
		{"health,init base", []func(*vm){func(v *vm) { c.Health(ctx, v.dial) }, ini(base)}},
		{"health,init entropy", []func(*vm){func(v *vm) { c.Health(ctx, v.dial) }, ini(withE)}},
		{"health,init names", []func(*vm){func(v *vm) { c.Health(ctx, v.dial) }, ini(withH)}},
		{"health,init resolv", []func(*vm){func(v *vm) { c.Health(ctx, v.dial) }, ini(withN)}},
		{"health,exec", []func(*vm){func(v *vm) { c.Health(ctx, v.dial) }, func(v *vm) {
			c.Run(ctx, v.dial, "", cube.ExecSpec{Args: []string{"/testguest", "echo", "hi"}})
		}}},
		{"health,exec fail", []func(*vm){func(v *vm) { c.Health(ctx, v.dial) }, func(v *vm) {
			c.Run(ctx, v.dial, "", cube.ExecSpec{Args: []string{"/nonexist", "echo", "hi"}})
		}}},
	}
	for i, s := range stages {
		for j := range 2 {
		layer := fmt.Sprintf("%s/layer%d-%d", im.dir, i, j)
		if out, err := exec.Command("cp", im.layer, layer).CombinedOutput(); err != nil {
			t.Fatal(string(out))
		}
		v := startVM(t, im, vmOptions{name: fmt.Sprint("c", i,"-", j), layer: layer, memory: im.dir + "/mem", clone: true})
		v.restore(t, im.dir+"/state")
		last := cpuTime(v.cmd.Process.Pid)
		line := s.name
		for _, f := range s.do {
			f(v)
			now := cpuTime(v.cmd.Process.Pid)
			line += fmt.Sprint(" +", now-last)
			last = now
		}
		t.Log(line)
		v.stop()
		}
	}
}
