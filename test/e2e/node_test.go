package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
	"github.com/cubesandbox/cubelet/api/cube/v1/cubev1connect"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

// node is a real cubelet process on a root and in a network namespace of its own.
type node struct {
	t       *testing.T
	root    string
	bin     string
	kernel  string
	flags   []string
	ns      netns.NsHandle
	proc    *exec.Cmd
	exited  chan struct{}
	logPath string

	sandboxes cubev1connect.SandboxServiceClient
	templates cubev1connect.TemplateServiceClient
	nodes     cubev1connect.NodeServiceClient
}

// startNode runs a node for one test. At the end of the test everything of the node is
// purged, and whatever is left fails the test.
func startNode(t *testing.T, flags ...string) *node {
	t.Helper()
	testenv.RequireRoot(t)
	testenv.Leaks(t)
	n := &node{t: t, root: testenv.TempRoot(t), bin: libexec(t), kernel: testenv.KernelDir(t), flags: flags}
	n.ns = newNamespace(t)
	n.logPath = n.root + "/cubelet.log"
	t.Cleanup(n.purge)
	n.start()
	n.connect()
	return n
}

// libexec is a directory with every binary of the product.
func libexec(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"cubelet", "cubecli", "cube-agent", "vmm-launcher", "containerd-shim-runc-v2"} {
		if err := os.Link(testenv.Binary(t, name), filepath.Join(dir, name)); err != nil {
			if err := os.Symlink(testenv.Binary(t, name), filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	return dir
}

// newNamespace makes a network namespace with loopback up. It lives as long as the
// handle or a process in it.
func newNamespace(t *testing.T) netns.NsHandle {
	t.Helper()
	made := make(chan netns.NsHandle)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine, in its namespace
		ns, err := netns.New()
		if err != nil {
			t.Errorf("network namespace: %v", err)
		} else if lo, err := netlink.LinkByName("lo"); err != nil {
			t.Errorf("loopback: %v", err)
		} else if err := netlink.LinkSetUp(lo); err != nil {
			t.Errorf("loopback: %v", err)
		}
		made <- ns
	}()
	ns := <-made
	if t.Failed() {
		t.FailNow()
	}
	t.Cleanup(func() { ns.Close() })
	return ns
}

// inNamespace runs f on a thread of the node's network namespace.
func (n *node) inNamespace(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if err := netns.Set(n.ns); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}

func (n *node) command(verb string, args ...string) *exec.Cmd {
	all := append([]string{verb, "--root", n.root, "--kernel-dir", n.kernel, "--libexec", n.bin, "--accel", "tcg"}, args...)
	return exec.Command(filepath.Join(n.bin, "cubelet"), all...)
}

// start starts the daemon and waits until it serves.
func (n *node) start() {
	n.t.Helper()
	log, err := os.OpenFile(n.logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		n.t.Fatal(err)
	}
	defer log.Close()
	cmd := n.command("serve", append([]string{"--pool-size", "8GiB"}, n.flags...)...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(os.Environ(), "DOCKER_CONFIG="+n.dockerDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := n.inNamespace(cmd.Start); err != nil {
		n.t.Fatal(err)
	}
	n.proc, n.exited = cmd, make(chan struct{})
	go func(done chan struct{}) {
		_ = cmd.Wait() // how it ended is in the log
		close(done)
	}(n.exited)
	n.connect()
	deadline := time.Now().Add(2 * time.Minute)
	for {
		ctx, cancel := context.WithTimeout(n.t.Context(), 5*time.Second)
		_, err := n.nodes.GetVersion(ctx, req(&cubev1.GetVersionRequest{}))
		cancel()
		if err == nil {
			return
		}
		select {
		case <-n.exited:
			n.t.Fatalf("cubelet ended: %v\n%s", cmd.ProcessState, n.logTail())
		case <-time.After(20 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			n.t.Fatalf("cubelet does not serve: %v\n%s", err, n.logTail())
		}
	}
}

// connect makes clients over the unix socket.
func (n *node) connect() {
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	hc := &http.Client{Transport: &http.Transport{
		Protocols: protocols,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", n.socket())
		},
	}}
	n.sandboxes = cubev1connect.NewSandboxServiceClient(hc, "http://cubelet")
	n.templates = cubev1connect.NewTemplateServiceClient(hc, "http://cubelet")
	n.nodes = cubev1connect.NewNodeServiceClient(hc, "http://cubelet")
}

func (n *node) socket() string { return n.root + "/run/cubelet.sock" }

// kill ends the daemon as a crash would.
func (n *node) kill() { n.signal(syscall.SIGKILL) }

// stop ends the daemon in an orderly way.
func (n *node) stop() { n.signal(syscall.SIGTERM) }

func (n *node) signal(sig syscall.Signal) {
	n.t.Helper()
	if err := n.proc.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		n.t.Fatal(err)
	}
	select {
	case <-n.exited:
	case <-time.After(time.Minute):
		n.t.Fatalf("cubelet did not end on %v\n%s", sig, n.logTail())
	}
}

// purge removes the node from the machine.
func (n *node) purge() {
	if n.t.Failed() {
		n.t.Logf("log of the node:\n%s", n.logTail())
	}
	select {
	case <-n.exited:
	default:
		n.stop()
	}
	cmd := n.command("purge", "--yes")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := n.inNamespace(cmd.Start)
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		n.t.Errorf("purge: %v\n%s", err, out.String())
	}
}

func (n *node) logTail() string {
	b, err := os.ReadFile(n.logPath)
	if err != nil {
		return err.Error()
	}
	if len(b) > 12000 {
		b = b[len(b)-12000:]
	}
	return string(b)
}

// result is what a run of cubecli gave.
type result struct {
	stdout, stderr string
	code           int
}

// cli runs cubecli against the node, with stdin as its input.
func (n *node) cli(stdin string, args ...string) result {
	n.t.Helper()
	cmd := exec.Command(filepath.Join(n.bin, "cubecli"), args...)
	cmd.Env = append(os.Environ(), "CUBELET_ADDRESS=unix://"+n.socket())
	cmd.Stdin = strings.NewReader(stdin)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		n.t.Fatal(err)
	}
	return result{out.String(), errs.String(), cmd.ProcessState.ExitCode()}
}

// must runs cubecli, expects success, and returns its standard output without the last
// newline.
func (n *node) must(args ...string) string {
	n.t.Helper()
	r := n.cli("", args...)
	if r.code != 0 {
		n.t.Fatalf("cubecli %s: exit %d\n%s%s\n%s", strings.Join(args, " "), r.code, r.stdout, r.stderr, n.logTail())
	}
	return strings.TrimSuffix(r.stdout, "\n")
}

// create makes a sandbox and returns its ID.
func (n *node) create(args ...string) string {
	n.t.Helper()
	return n.must(append([]string{"sandbox", "create", "-q"}, args...)...)
}

// exec runs a program in a sandbox and returns its output; it must exit with 0.
func (n *node) exec(id string, args ...string) string {
	n.t.Helper()
	return n.must(append([]string{"sandbox", "exec", id, "--"}, args...)...)
}

// sandbox returns what the node says of a sandbox.
func (n *node) sandbox(id string) *cubev1.Sandbox {
	n.t.Helper()
	res, err := n.sandboxes.GetSandbox(n.t.Context(), req(&cubev1.GetSandboxRequest{SandboxId: id}))
	if err != nil {
		n.t.Fatal(err)
	}
	return res.Msg.Sandbox
}

// wantClean expects `cubelet check` to find nothing.
func (n *node) wantClean() {
	n.t.Helper()
	cmd := n.command("check")
	out, err := cmd.CombinedOutput()
	if err != nil || len(bytes.TrimSpace(out)) != 0 {
		n.t.Errorf("cubelet check: %v\n%s", err, out)
	}
}

func decode[T any](t *testing.T, s string) T {
	t.Helper()
	var v T
	if err := json.Unmarshal([]byte(s), &v); err != nil {
		t.Fatalf("%v in %q", err, s)
	}
	return v
}

// alive reports whether a process exists.
func alive(pid int64) bool {
	_, err := os.Stat(fmt.Sprintf("/proc/%d", pid))
	return err == nil
}
