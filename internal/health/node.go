// Package health measures the node: what it has, what it uses, and whether its parts
// work. Nothing in a status is a constant; each condition comes from trying the thing.
package health

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	cube "github.com/cubesandbox/cubelet"
)

// Probe tries one part of the node.
type Probe struct {
	Type string // condition type, for example "StorageWritable"
	Good string // the reason when it works
	Run  func(context.Context) error
}

// Config says where a status comes from. Every field is required.
type Config struct {
	Name        string
	Version     cube.Version
	Machine     cube.MachineInfo
	AccelReason string
	Usage       func() (total, used int64, err error) // of the pool, bytes
	Reflink     bool
	Phases      func() map[cube.Phase]int
	Templates   func(context.Context) ([]cube.Template, error)
	VMMSlots    func() int
	NetSlots    func() int
	Probes      []Probe
	Check       func(context.Context) ([]cube.Finding, error)
	// ProbeTimeout bounds each probe.
	ProbeTimeout time.Duration
	Now          func() time.Time
}

// Node implements cube.Node.
type Node struct {
	cfg     Config
	started time.Time

	mu   sync.Mutex // guards last
	last map[string]cube.Condition
}

// NewNode returns a node that started now.
func NewNode(cfg Config) *Node {
	return &Node{cfg: cfg, started: cfg.Now(), last: map[string]cube.Condition{}}
}

// Version implements cube.Node.
func (n *Node) Version() cube.Version { return n.cfg.Version }

// Status implements cube.Node. It runs every probe.
func (n *Node) Status(ctx context.Context) (cube.NodeStatus, error) {
	conditions := n.probe(ctx)
	model, err := cpuModel()
	if err != nil {
		return cube.NodeStatus{}, err
	}
	load, err := load1()
	if err != nil {
		return cube.NodeStatus{}, err
	}
	total, available, err := memory()
	if err != nil {
		return cube.NodeStatus{}, err
	}
	poolTotal, poolUsed, err := n.cfg.Usage()
	if err != nil {
		return cube.NodeStatus{}, fmt.Errorf("pool usage: %w", err)
	}
	templates, err := n.cfg.Templates(ctx)
	if err != nil {
		return cube.NodeStatus{}, fmt.Errorf("list templates: %w", err)
	}
	return cube.NodeStatus{
		Name: n.cfg.Name, Version: n.cfg.Version, StartedAt: n.started,
		CPUs: runtime.NumCPU(), CPUModel: model, Load1: load,
		MemoryBytes: total, MemoryAvailable: available,
		PoolBytes: poolTotal, PoolUsed: poolUsed, PoolReflink: n.cfg.Reflink,
		Machine: n.cfg.Machine, AcceleratorReason: n.cfg.AccelReason,
		Phases: n.cfg.Phases(), Templates: len(templates),
		VMMSlots: n.cfg.VMMSlots(), NetworkSlots: n.cfg.NetSlots(),
		Conditions: conditions,
	}, nil
}

// Check implements cube.Node.
func (n *Node) Check(ctx context.Context) ([]cube.Finding, error) { return n.cfg.Check(ctx) }

// Healthy runs the probes and returns the first failure, for the health service.
func (n *Node) Healthy(ctx context.Context) error {
	for _, c := range n.probe(ctx) {
		if !c.Status {
			return cube.Errorf(cube.CodeUnavailable, "%s: %s", c.Type, c.Reason)
		}
	}
	return nil
}

// probe runs every probe at once and remembers when each condition last changed.
func (n *Node) probe(ctx context.Context) []cube.Condition {
	ctx, cancel := context.WithTimeout(ctx, n.cfg.ProbeTimeout)
	defer cancel()
	errs := make([]error, len(n.cfg.Probes))
	var wg sync.WaitGroup
	for i, p := range n.cfg.Probes {
		wg.Go(func() { errs[i] = p.Run(ctx) })
	}
	wg.Wait()
	n.mu.Lock()
	defer n.mu.Unlock()
	ready := cube.Condition{Type: "Ready", Status: true, Reason: "every part works"}
	var all []cube.Condition
	for i, p := range n.cfg.Probes {
		c := cube.Condition{Type: p.Type, Status: errs[i] == nil, Reason: p.Good}
		if errs[i] != nil {
			c.Reason = errs[i].Error()
			ready.Status, ready.Reason = false, p.Type+": "+c.Reason
		}
		all = append(all, n.settle(c))
	}
	return append([]cube.Condition{n.settle(ready)}, all...)
}

// settle sets Since: the moment when the status last became what it is.
func (n *Node) settle(c cube.Condition) cube.Condition {
	c.Since = n.cfg.Now()
	if old, ok := n.last[c.Type]; ok && old.Status == c.Status {
		c.Since = old.Since
	}
	n.last[c.Type] = c
	return c
}

func cpuModel() (string, error) {
	b, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "", fmt.Errorf("processor model: %w", err)
	}
	for line := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
			return strings.TrimSpace(v), nil
		}
	}
	return "", fmt.Errorf("processor model: not in /proc/cpuinfo")
}

func load1() (float64, error) {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0, fmt.Errorf("load: %w", err)
	}
	first, _, _ := strings.Cut(string(b), " ")
	return strconv.ParseFloat(first, 64)
}

// memory returns the host's total and available memory in bytes.
func memory() (total, available int64, err error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, 0, fmt.Errorf("memory: %w", err)
	}
	s := bufio.NewScanner(bytes.NewReader(b))
	for s.Scan() {
		f := strings.Fields(s.Text())
		if len(f) < 2 {
			continue
		}
		kib, err := strconv.ParseInt(f[1], 10, 64)
		if err != nil {
			continue
		}
		switch f[0] {
		case "MemTotal:":
			total = kib << 10
		case "MemAvailable:":
			available = kib << 10
		}
	}
	if total == 0 {
		return 0, 0, fmt.Errorf("memory: not in /proc/meminfo")
	}
	return total, available, nil
}

var _ cube.Node = (*Node)(nil)
