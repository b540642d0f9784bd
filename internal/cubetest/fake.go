// Package cubetest holds a node that exists only in memory, for tests of what sits on top
// of the interfaces of package cube. Its sandboxes run their programs as processes of
// the test and keep their files below a temporary directory.
package cubetest

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	cube "github.com/cubesandbox/cubelet"
)

// Epoch is the time at which everything in the fake was made.
func Epoch() time.Time { return time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC) }

// Node is a fake node. It prints itself as text, see String.
type Node struct {
	t    testing.TB
	root string // holds one directory per sandbox, the guest's file system

	mu        sync.Mutex
	made      int
	sandboxes map[string]*sandbox
	templates map[string]cube.Template
	keys      map[string]keyed
	hooks     map[string]func(context.Context) error
	running   map[*exec.Cmd]bool
	logs      string
	guest     *guestServer
}

type sandbox struct {
	cube.Sandbox
	spec  cube.SandboxSpec
	token string
}

type keyed struct{ request, id string }

// New returns a node with the template tpl-base00 named "base". At the end of the test
// it stops what its sandboxes run.
func New(t testing.TB) *Node {
	n := &Node{
		t:         t,
		root:      t.TempDir(),
		sandboxes: map[string]*sandbox{},
		templates: map[string]cube.Template{},
		keys:      map[string]keyed{},
		hooks:     map[string]func(context.Context) error{},
		running:   map[*exec.Cmd]bool{},
		logs:      "booting\nagent ready\n",
	}
	n.AddTemplate("tpl-base00", "base")
	n.guest = newGuestServer(n)
	t.Cleanup(n.close)
	return n
}

func (n *Node) close() {
	n.guest.Close()
	n.mu.Lock()
	defer n.mu.Unlock()
	for cmd := range n.running {
		_ = cmd.Process.Kill() // it may have ended by itself
	}
}

// AddTemplate adds a ready template.
func (n *Node) AddTemplate(id string, names ...string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	size := cube.Resources{VCPUs: 1, MemoryMiB: 512}
	n.templates[id] = cube.Template{
		ID:        id,
		Names:     names,
		State:     cube.TemplateReady,
		Image:     "registry.test/" + cmp.Or(strings.Join(names, ","), id),
		Digest:    "sha256:" + strings.Repeat("0", 64),
		Resources: size,
		DiskMiB:   1024,
		CreatedAt: Epoch(),
		RootBytes: 64 << 20,
		Sizes:     []cube.Resources{size},
		Machine:   machine(),
	}
}

// SetLogs sets the console log of every sandbox.
func (n *Node) SetLogs(text string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.logs = text
}

// On runs f at the beginning of every call of that name, for example "create" or
// "template create"; the call fails with the error of f.
func (n *Node) On(call string, f func(context.Context) error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.hooks[call] = f
}

func (n *Node) begin(ctx context.Context, call string) error {
	n.mu.Lock()
	f := n.hooks[call]
	n.mu.Unlock()
	if f == nil {
		return ctx.Err()
	}
	return f(ctx)
}

// GuestDir is the host directory that holds the guest's file system.
func (n *Node) GuestDir(id string) string { return n.root + "/" + id }

// Running tells how many programs run in all sandboxes.
func (n *Node) Running() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.running)
}

// Spec returns the request that made a sandbox.
func (n *Node) Spec(id string) cube.SandboxSpec {
	n.mu.Lock()
	defer n.mu.Unlock()
	sb, ok := n.sandboxes[id]
	if !ok {
		n.t.Errorf("no sandbox %s", id)
		return cube.SandboxSpec{}
	}
	return sb.spec
}

// String lists what exists, one object a line.
func (n *Node) String() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var b strings.Builder
	for _, id := range slices.Sorted(maps.Keys(n.templates)) {
		fmt.Fprintf(&b, "template %s %v\n", id, n.templates[id].Names)
	}
	for _, id := range slices.Sorted(maps.Keys(n.sandboxes)) {
		fmt.Fprintf(&b, "sandbox %s %s\n", id, n.sandboxes[id].Phase)
	}
	return b.String()
}

// Sandboxes returns the node's sandboxes.
func (n *Node) Sandboxes() cube.Sandboxes { return sandboxes{n} }

// Templates returns the node's templates.
func (n *Node) Templates() cube.Templates { return templates{n} }

// Node returns the node as a whole.
func (n *Node) Node() cube.Node { return status{n} }

// findSandbox resolves an ID or a unique prefix. The caller holds mu.
func (n *Node) findSandbox(ref string) (*sandbox, error) {
	if sb, ok := n.sandboxes[ref]; ok {
		return sb, nil
	}
	id, err := unique(slices.Collect(maps.Keys(n.sandboxes)), ref, "sandbox_id")
	if err != nil {
		return nil, err
	}
	if id == "" {
		return nil, &cube.Error{Code: cube.CodeNotFound, ID: ref, Err: fmt.Errorf("no such sandbox")}
	}
	return n.sandboxes[id], nil
}

// findTemplate resolves an ID, a name or a unique prefix. The caller holds mu.
func (n *Node) findTemplate(ref string) (cube.Template, error) {
	if tpl, ok := n.templates[ref]; ok {
		return tpl, nil
	}
	for _, tpl := range n.templates {
		if slices.Contains(tpl.Names, ref) {
			return tpl, nil
		}
	}
	id, err := unique(slices.Collect(maps.Keys(n.templates)), ref, "template_id")
	if err != nil {
		return cube.Template{}, err
	}
	if id == "" {
		return cube.Template{}, cube.Errorf(cube.CodeNotFound, "template %s not found", ref).
			WithHint("List the templates with `cubecli template list`.")
	}
	return n.templates[id], nil
}

func unique(ids []string, prefix, field string) (string, error) {
	found := ""
	for _, id := range ids {
		if !strings.HasPrefix(id, prefix) {
			continue
		}
		if found != "" {
			return "", cube.InvalidField(field, "%q is the beginning of several IDs", prefix)
		}
		found = id
	}
	return found, nil
}

func machine() cube.MachineInfo {
	return cube.MachineInfo{
		QEMU: "10.0.2", MachineType: "microvm", CPUModel: "max", Accelerator: "tcg", Kernel: "6.1.0", Agent: "test",
	}
}

// status implements cube.Node.
type status struct{ n *Node }

// Check implements cube.Node: everything fits.
func (status) Check(context.Context) ([]cube.Finding, error) { return nil, nil }

// Version implements cube.Node.
func (status) Version() cube.Version {
	return cube.Version{Cubelet: "v0.0.0-test", Commit: "0123456789ab", Go: "go1.0", API: "cube.v1"}
}

// Status implements cube.Node.
func (s status) Status(ctx context.Context) (cube.NodeStatus, error) {
	if err := s.n.begin(ctx, "status"); err != nil {
		return cube.NodeStatus{}, err
	}
	s.n.mu.Lock()
	defer s.n.mu.Unlock()
	phases := map[cube.Phase]int{}
	for _, sb := range s.n.sandboxes {
		phases[sb.Phase]++
	}
	return cube.NodeStatus{
		Name:              "node-1",
		Version:           s.Version(),
		StartedAt:         Epoch(),
		CPUs:              2,
		CPUModel:          "Test CPU",
		Load1:             0.5,
		MemoryBytes:       8 << 30,
		MemoryAvailable:   6 << 30,
		PoolBytes:         100 << 30,
		PoolUsed:          25 << 30,
		PoolReflink:       true,
		Machine:           machine(),
		AcceleratorReason: "no /dev/kvm",
		Phases:            phases,
		Templates:         len(s.n.templates),
		VMMSlots:          2,
		NetworkSlots:      3,
		Conditions: []cube.Condition{
			{Type: "StorageWritable", Status: true, Reason: "wrote and synced 4 KiB", Since: Epoch()},
			{Type: "ContainerdReady", Status: false, Reason: "no answer for 3 s", Since: Epoch()},
		},
	}, nil
}

// mkdir makes a directory of the fake; a test machine on which that fails is broken.
func (n *Node) mkdir(dir string) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		n.t.Errorf("make %s: %v", dir, err)
	}
}
