package guest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cubelet/internal/initramfs"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

// vmImages are the files that a virtual machine of these tests starts from.
type vmImages struct {
	dir, kernel, initrd, root, layer string
}

// buildImages makes a root file system with one static program and an empty layer.
func buildImages(t testing.TB) vmImages {
	t.Helper()
	testenv.RequireRoot(t)
	kernel := testenv.KernelDir(t)
	dir := testenv.TempRoot(t)
	release, err := os.ReadFile(filepath.Join(kernel, "release"))
	if err != nil {
		t.Fatal(err)
	}
	im := vmImages{
		dir: dir, kernel: filepath.Join(kernel, "vmlinuz"),
		initrd: filepath.Join(dir, "initrd"), root: filepath.Join(dir, "root"), layer: filepath.Join(dir, "layer"),
	}
	err = initramfs.BuildFile(im.initrd, initramfs.Config{
		Agent: testenv.Binary(t, "cube-agent"), ModulesDir: filepath.Join(kernel, "modules"), Release: strings.TrimSpace(string(release)),
	})
	if err != nil {
		t.Fatal(err)
	}
	tree := filepath.Join(dir, "tree")
	if err := os.Mkdir(tree, 0o755); err != nil {
		t.Fatal(err)
	}
	command(t, "go", "build", "-trimpath", "-ldflags=-s -w", "-o", filepath.Join(tree, "testguest"), "./testguest")
	command(t, "mkfs.erofs", "--quiet", im.root, tree)
	command(t, "truncate", "-s", "64M", im.layer)
	command(t, "mkfs.ext4", "-q", im.layer)
	return im
}

func command(t testing.TB, name string, args ...string) {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
}

// vm is a running virtual machine.
type vm struct {
	cmd     *exec.Cmd
	console string
	port    int
	qmp     net.Conn
	answers *bufio.Reader
	exited  chan struct{}
}

// vmOptions are what differs between a cold boot, a template and its clones.
type vmOptions struct {
	name    string
	layer   string
	memory  string // file of the guest's memory, empty for none
	clone   bool   // map memory privately and wait for the device state
	cmdline string
}

const memoryMiB = 256

// startVM starts QEMU with user-mode networking: the agent's port is forwarded from
// the loopback interface.
func startVM(t testing.TB, im vmImages, o vmOptions) *vm {
	t.Helper()
	v := &vm{console: filepath.Join(im.dir, o.name+".console"), port: freePort(t), exited: make(chan struct{})}
	sock := filepath.Join(im.dir, o.name+".qmp")
	mem, share := "memory-backend-ram,id=m0,size="+fmt.Sprint(memoryMiB)+"M", "on"
	if o.clone {
		share = "off,readonly=on,rom=off"
	}
	if o.memory != "" {
		mem = fmt.Sprintf("memory-backend-file,id=m0,size=%dM,mem-path=%s,share=%s", memoryMiB, o.memory, share)
	}
	args := []string{
		"-M", "microvm,acpi=on,rtc=on,pit=off,pic=off,memory-backend=m0", "-accel", "tcg,tb-size=64", "-cpu", "max", "-smp", "1", "-m", fmt.Sprint(memoryMiB),
		"-object", mem, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-serial", "file:" + v.console, "-qmp", "unix:" + sock + ",server=on,wait=off",
		"-blockdev", "driver=file,filename=" + im.root + ",node-name=d0,read-only=on,locking=off", "-device", "virtio-blk-device,drive=d0",
		"-blockdev", "driver=file,filename=" + o.layer + ",node-name=d1,locking=off", "-device", "virtio-blk-device,drive=d1",
		"-netdev", fmt.Sprintf("user,id=n0,restrict=on,hostfwd=tcp:127.0.0.1:%d-10.0.2.15:49983", v.port),
		"-device", "virtio-net-device,netdev=n0,mac=02:cb:00:00:00:01",
	}
	if o.clone {
		args = append(args, "-incoming", "defer")
	} else {
		args = append(args, "-kernel", im.kernel, "-initrd", im.initrd, "-append", o.cmdline+" mitigations=off tsc=reliable tsc_early_khz="+tscKHz(t))
	}
	v.cmd = exec.Command("qemu-system-x86_64", args...)
	v.cmd.Stdout, v.cmd.Stderr = os.Stderr, os.Stderr
	if err := v.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = v.cmd.Wait()
		close(v.exited)
	}()
	t.Cleanup(v.stop)
	testenv.Eventually(t, 10*time.Second, func() (err error) {
		v.qmp, err = net.Dial("unix", sock)
		return err
	})
	v.answers = bufio.NewReader(v.qmp)
	v.do(t, "qmp_capabilities", nil)
	return v
}

func (v *vm) stop() {
	if v.qmp != nil {
		v.qmp.Close()
	}
	_ = v.cmd.Process.Kill()
	<-v.exited
}

func (v *vm) dial(ctx context.Context, _ int) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", v.port))
}

// do sends a QMP command and returns its result.
func (v *vm) do(t testing.TB, name string, args map[string]any) json.RawMessage {
	t.Helper()
	cmd := map[string]any{"execute": name}
	if args != nil {
		cmd["arguments"] = args
	}
	b, err := json.Marshal(cmd)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := v.qmp.Write(b); err != nil {
		t.Fatal(err)
	}
	for {
		line, err := v.answers.ReadBytes('\n')
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		var res struct {
			Return json.RawMessage `json:"return"`
			Error  *struct {
				Desc string `json:"desc"`
			} `json:"error"`
		}
		if err := json.Unmarshal(line, &res); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if res.Error != nil {
			t.Fatalf("%s: %s", name, res.Error.Desc)
		}
		if res.Return != nil {
			return res.Return
		}
	}
}

func (v *vm) ignoreShared(t testing.TB) {
	v.do(t, "migrate-set-capabilities", map[string]any{"capabilities": []map[string]any{{"capability": "x-ignore-shared", "state": true}}})
}

// save stops the machine and writes its device state.
func (v *vm) save(t testing.TB, state string) {
	t.Helper()
	v.do(t, "stop", nil)
	v.ignoreShared(t)
	v.do(t, "migrate", map[string]any{"uri": "file:" + state})
	v.waitMigration(t)
}

// restore loads the device state and lets the machine run.
func (v *vm) restore(t testing.TB, state string) {
	t.Helper()
	v.ignoreShared(t)
	v.do(t, "migrate-incoming", map[string]any{"uri": "file:" + state})
	v.waitMigration(t)
	v.do(t, "cont", nil)
}

func (v *vm) waitMigration(t testing.TB) {
	t.Helper()
	testenv.Eventually(t, 20*time.Second, func() error {
		var st struct{ Status string }
		if err := json.Unmarshal(v.do(t, "query-migrate", nil), &st); err != nil {
			return err
		}
		if st.Status != "completed" {
			return errors.New("migration is " + st.Status)
		}
		return nil
	})
}

// consoleOnFailure shows what the guest printed when the test fails.
func (v *vm) consoleOnFailure(t testing.TB) {
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		f, err := os.Open(v.console)
		if err != nil {
			return
		}
		defer f.Close()
		b, _ := io.ReadAll(f)
		t.Logf("console of the guest:\n%s", b)
	})
}

func freePort(t testing.TB) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// tscKHz returns the frequency of the host's time stamp counter. An emulated guest has
// nothing to measure it with.
func tscKHz(t testing.TB) string {
	t.Helper()
	b, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		key, value, _ := strings.Cut(line, ":")
		if strings.TrimSpace(key) != "cpu MHz" {
			continue
		}
		mhz, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
		if err != nil {
			t.Fatal(err)
		}
		return strconv.Itoa(int(mhz * 1000))
	}
	t.Fatal("/proc/cpuinfo has no cpu MHz")
	return ""
}
