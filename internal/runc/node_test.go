package runc

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"

	"github.com/cubesandbox/cubelet/internal/containerd"
	"github.com/cubesandbox/cubelet/internal/testenv"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// limits of a small VMM.
func limits() vmm.Limits { return vmm.Limits{MemoryBytes: 256 << 20, MilliCPUs: 1000, PIDs: 64} }

// node is a daemon's containerd and slots, which can be stopped and started again.
type node struct {
	t      *testing.T
	root   string
	target int
	log    *slog.Logger
	server *containerd.Server
	client *client.Client
	*Slots
}

// newNode starts a node that keeps target slots waiting, and removes every slot in the
// end.
func newNode(t *testing.T, target int) *node {
	t.Helper()
	testenv.RequireRoot(t)
	testenv.Leaks(t)
	n := &node{t: t, root: testenv.TempRoot(t), target: target}
	n.log = slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	n.start()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		list, err := n.List(ctx)
		if err != nil {
			t.Error(err)
		}
		for _, in := range list {
			if err := n.Destroy(ctx, in.Owner); err != nil {
				t.Error(err)
			}
		}
		n.stop()
	})
	return n
}

func (n *node) start() {
	n.t.Helper()
	var err error
	n.server, err = containerd.Start(n.t.Context(), containerd.Config{
		Root: filepath.Join(n.root, "containerd"), State: filepath.Join(n.root, "run", "c"),
		Address: filepath.Join(n.root, "run", "containerd.sock"), ShimSocketDir: filepath.Join(n.root, "run", "s"),
		LibexecDir: filepath.Dir(testenv.Binary(n.t, "containerd-shim-runc-v2")), Log: n.log,
	})
	if err != nil {
		n.t.Fatal(err)
	}
	n.client, err = n.server.Client("test")
	if err != nil {
		n.t.Fatal(err)
	}
	n.Slots, err = New(n.t.Context(), n.config())
	if err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) config() Config {
	runc, err := exec.LookPath("runc")
	if err != nil {
		n.t.Fatalf("runc is missing: %v", err)
	}
	return Config{
		Client: n.client, RunDir: filepath.Join(n.root, "run", "vmm"), Launcher: testenv.Binary(n.t, "vmm-launcher"),
		RuncBinary: runc, RuncRoot: filepath.Join(n.root, "run", "runc"), Target: n.target, Log: n.log,
		CgroupParent: "/" + filepath.Base(n.root), Exits: n.server.LostExits(),
	}
}

// die ends the daemon's part without telling the slots, as kill -9 would.
func (n *node) die() {
	n.t.Helper()
	n.mu.Lock()
	slots := n.Slots
	stop, done := slots.stop, slots.done
	n.mu.Unlock()
	stop()
	if done != nil {
		<-done
	}
	n.client.Close()
	n.server.Stop()
}

func (n *node) stop() {
	n.t.Helper()
	if err := n.Close(); err != nil {
		n.t.Error(err)
	}
	n.client.Close()
	n.server.Stop()
}

func (n *node) claim(owner string) vmm.Instance {
	n.t.Helper()
	in, err := n.Claim(n.t.Context(), owner, limits())
	if err != nil {
		n.t.Fatal(err)
	}
	return in
}

// report is the probe's Report.
type report struct {
	Args, Env  []string
	Status     map[string]string
	PID, UID   int
	Interfaces []string
	Root       []string
	Attempts   map[string]string
	CoreLimit  uint64
	FileLimit  uint64
	CoreFilter string
	Fd4        string
}

// probe makes the owner's slot the probe program and returns what it reports.
func (n *node) probe(owner string, args ...string) report {
	n.t.Helper()
	path, err := buildProbe()
	if err != nil {
		n.t.Fatal(err)
	}
	program, err := os.Open(path)
	if err != nil {
		n.t.Fatal(err)
	}
	defer program.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		n.t.Fatal(err)
	}
	defer null.Close()
	r, w, err := os.Pipe()
	if err != nil {
		n.t.Fatal(err)
	}
	defer r.Close()
	extra, err := os.CreateTemp(n.t.TempDir(), "")
	if err != nil {
		n.t.Fatal(err)
	}
	defer extra.Close()
	if _, err := extra.WriteString("text of " + owner); err != nil {
		n.t.Fatal(err)
	}
	args = append([]string{"/proc/self/fd/3"}, args...)
	err = n.Launch(n.t.Context(), owner, args, []string{"A=1"}, []*os.File{null, w, null, program, extra})
	w.Close()
	if err != nil {
		n.t.Fatal(err)
	}
	line, err := bufio.NewReader(r).ReadBytes('\n')
	if err != nil {
		n.t.Fatalf("probe's report: %v (%q)", err, line)
	}
	var rep report
	if err := json.Unmarshal(line, &rep); err != nil {
		n.t.Fatal(err)
	}
	return rep
}

// buildProbe builds the probe once for all tests. It is static: the jail need not hold
// the libraries that the test binary was linked with.
var buildProbe = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "probe")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "probe")
	cmd := exec.Command("go", "build", "-o", path, "./testdata/probe")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build probe: %w\n%s", err, out)
	}
	return path, nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	if path, err := buildProbe(); err == nil {
		os.RemoveAll(filepath.Dir(path))
	}
	os.Exit(code)
}

// awaitExitFile returns when the shim has written down how the slot's process ended.
func awaitExitFile(t *testing.T, n *node, slot string) {
	t.Helper()
	file := filepath.Join(n.root, "run", "c", "io.containerd.runtime.v2.task", "test", slot, "exit.json")
	testenv.Eventually(t, 10*time.Second, func() error {
		_, err := os.Stat(file)
		return err
	})
}
