// Package daemon wires a node: it makes every part in order, hands each what it needs,
// recovers what an earlier daemon left, and serves until it is told to stop.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	client "github.com/containerd/containerd/v2/client"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/containerd"
	"github.com/cubesandbox/cubelet/internal/guest"
	"github.com/cubesandbox/cubelet/internal/health"
	"github.com/cubesandbox/cubelet/internal/image"
	"github.com/cubesandbox/cubelet/internal/initramfs"
	"github.com/cubesandbox/cubelet/internal/journal"
	"github.com/cubesandbox/cubelet/internal/runc"
	"github.com/cubesandbox/cubelet/internal/sandbox"
	"github.com/cubesandbox/cubelet/internal/server"
	"github.com/cubesandbox/cubelet/internal/template"
	"github.com/cubesandbox/cubelet/internal/vmm"
	"github.com/cubesandbox/cubelet/internal/vmm/qemu"
	"github.com/cubesandbox/cubelet/networkagent"
	"github.com/cubesandbox/cubelet/storage"
)

const (
	containerdNamespace = "cubelet"
	undoTimeout         = 2 * time.Minute
	retryDelete         = 30 * time.Second
	keepKeys            = time.Hour
	pruneKeysEvery      = 10 * time.Minute
	probeTimeout        = 10 * time.Second
)

// Run runs a node until ctx ends. Running sandboxes outlive it. The configuration is
// validated, and the process is in the node's mount namespace.
func Run(ctx context.Context, cfg Config) (err error) {
	begin := time.Now()
	if os.Geteuid() != 0 {
		return cube.Errorf(cube.CodePermissionDenied, "cubelet must run as root").WithHint("use sudo; `cubelet doctor` lists what else is needed")
	}
	l := cfg.layout()
	lock, err := openRoot(l)
	if err != nil {
		return err
	}
	defer lock.Close()
	var close closers
	defer func() { err = errors.Join(err, close.run()) }()

	n, err := openNode(ctx, cfg, l, &close)
	if err != nil {
		return err
	}
	actions, err := n.manager.Recover(ctx)
	if err != nil {
		return fmt.Errorf("recover: %w", err)
	}
	n.slots.Start(ctx)
	n.network.Start(ctx)

	listeners, err := listen(cfg)
	if err != nil {
		return err
	}
	cfg.Log.Info("ready", "node", cfg.Name, "root", cfg.Root, "accelerator", n.machine.Accelerator, "why", n.accelReason,
		"address", cfg.Address, "recovered", len(actions), "took", time.Since(begin).Round(time.Millisecond))
	go n.pruneKeys(ctx)
	return server.Serve(ctx, listeners, n.handler(cfg), cfg.Log)
}

// openRoot makes the root's directories and locks it.
func openRoot(l layout) (*os.File, error) {
	for _, dir := range []string{l.root, l.run} {
		// Others may pass, not look: the jails' directories below belong to the VMMs' users.
		if err := os.MkdirAll(dir, 0o711); err != nil {
			return nil, fmt.Errorf("make %s: %w", dir, err)
		}
	}
	lock, err := lockRoot(l.lock)
	if err != nil {
		return nil, err
	}
	err = clearEarlierBoot(l)
	if err == nil {
		err = os.MkdirAll(l.qemu, 0o700)
	}
	if err != nil {
		lock.Close()
		return nil, err
	}
	return lock, nil
}

// node is the wired parts.
type node struct {
	log         *slog.Logger
	pool        *storage.Pool
	journal     *journal.Journal
	containerd  *client.Client
	slots       *runc.Slots
	driver      *qemu.Driver
	network     *networkagent.Agent
	templates   *template.Manager
	manager     *sandbox.Manager
	machine     cube.MachineInfo
	accelReason string
	probes      *journal.Table[time.Time]
}

// closers ends parts in the reverse order of their making.
type closers struct{ fns []func() error }

func (c *closers) add(name string, f func() error) {
	c.fns = append(c.fns, func() error {
		if err := f(); err != nil {
			return fmt.Errorf("close %s: %w", name, err)
		}
		return nil
	})
}

func (c *closers) run() error {
	var all []error
	for i := len(c.fns) - 1; i >= 0; i-- {
		all = append(all, c.fns[i]())
	}
	return errors.Join(all...)
}

// openNode is the ladder: each part is made from those above it, and its end is
// registered on the next line.
func openNode(ctx context.Context, cfg Config, l layout, close *closers) (_ *node, err error) {
	n := &node{log: cfg.Log}
	if n.pool, err = storage.OpenPool(ctx, storage.Config{Dir: l.pool, Image: l.poolImage, SizeBytes: cfg.PoolBytes, Log: cfg.Log}); err != nil {
		return nil, fmt.Errorf("open pool: %w", err)
	}
	close.add("pool", func() error { return n.pool.Close(false) })
	if n.journal, err = journal.Open(l.journal, journal.Config{Log: cfg.Log}); err != nil {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	close.add("journal", n.journal.Close)
	n.probes = journal.NewTable[time.Time](n.journal, "probe")
	recs := newRecords(n.journal)
	existing, _, err := recs.Load(ctx)
	if err != nil {
		return nil, fmt.Errorf("load journal: %w", err)
	}
	owners := sandbox.Owners(existing)

	if err := n.openVMMs(ctx, cfg, l, owners, close); err != nil {
		return nil, err
	}
	n.network, err = networkagent.New(networkagent.Config{RunDir: l.net, Node: cfg.tag(), HostPrefix: cfg.HostPrefix, Target: cfg.NetworkSlots, Log: cfg.Log})
	if err != nil {
		return nil, fmt.Errorf("network agent: %w", err)
	}
	close.add("network agent", n.network.Close)
	if err := n.network.Adopt(ctx, owners); err != nil {
		return nil, fmt.Errorf("adopt networks: %w", err)
	}
	if err := n.openTemplates(ctx, cfg, l); err != nil {
		return nil, err
	}
	close.add("templates", n.templates.Close)
	n.manager = sandbox.New(sandbox.Config{
		VMMs: n.driver, Network: n.network, Disks: n.pool, Templates: n.templates,
		Guest: guest.New(cfg.Log), Records: recs,
		Node: sandbox.NodeFacts{
			SandboxesDir: n.pool.SandboxesDir(),
			Nameservers:  n.network.Nameservers(),
			Limits:       n.driver.LimitsFor,
		},
		Log: cfg.Log, Now: time.Now, MaxSandboxes: cfg.MaxSandboxes,
		UndoTimeout: undoTimeout, RetryDelete: retryDelete, KeepKeys: keepKeys,
	})
	close.add("sandboxes", func() error { n.manager.Close(); return nil })
	return n, nil
}

// openVMMs makes containerd, the jail and the QEMU driver.
func (n *node) openVMMs(ctx context.Context, cfg Config, l layout, owners []string, close *closers) (err error) {
	accel, reason, err := qemu.ProbeAccel(cfg.Accel)
	if err != nil {
		return err
	}
	n.accelReason = reason
	qemuPath, err := findTool(cfg.QEMU)
	if err != nil {
		return err
	}
	runcPath, err := findTool(cfg.Runc)
	if err != nil {
		return err
	}
	var exits []vmm.Exit // of VMMs that ended while no daemon ran
	if cfg.ContainerdAddress != "" {
		n.containerd, err = containerd.Connect(ctx, cfg.ContainerdAddress, containerdNamespace)
	} else {
		var srv *containerd.Server
		srv, err = containerd.Start(ctx, containerd.Config{
			Root: l.containerd, State: l.state, Address: l.containerdSock, ShimSocketDir: l.shims,
			LibexecDir: cfg.LibexecDir, Log: cfg.Log,
		})
		if err != nil {
			return fmt.Errorf("containerd: %w", err)
		}
		close.add("containerd", func() error { srv.Stop(); return nil })
		exits = srv.LostExits()
		n.containerd, err = srv.Client(containerdNamespace)
	}
	if err != nil {
		return fmt.Errorf("connect to containerd: %w", err)
	}
	close.add("containerd client", n.containerd.Close)
	n.slots, err = runc.New(ctx, runc.Config{
		Client: n.containerd, RunDir: l.vmm, Launcher: filepath.Join(cfg.LibexecDir, "vmm-launcher"),
		RuncBinary: runcPath, RuncRoot: l.runcRoot, Target: cfg.VMMSlots, KVM: accel == "kvm",
		CgroupParent: "/cubelet-" + cfg.tag(), Exits: exits, Log: cfg.Log,
	})
	if err != nil {
		return fmt.Errorf("VMM slots: %w", err)
	}
	close.add("VMM slots", n.slots.Close)
	if err := n.slots.Adopt(ctx, owners); err != nil {
		return fmt.Errorf("adopt VMM slots: %w", err)
	}
	n.driver, err = qemu.New(qemu.Config{Jail: n.slots, Binary: qemuPath, RunDir: l.qemu, Accel: accel, Log: cfg.Log})
	if err != nil {
		return fmt.Errorf("QEMU: %w", err)
	}
	if err := n.driver.Sweep(ctx); err != nil {
		return fmt.Errorf("sweep what ended VMMs left: %w", err)
	}
	return nil
}

// openTemplates builds the initial RAM file system and opens the templates.
func (n *node) openTemplates(ctx context.Context, cfg Config, l layout) error {
	release, err := os.ReadFile(filepath.Join(cfg.KernelDir, "release"))
	if err != nil {
		return cube.Errorf(cube.CodeFailedPrecondition, "guest kernel: %w", err).WithHint("run scripts/fetch-kernel %s", cfg.KernelDir)
	}
	kernel := strings.TrimSpace(string(release))
	agent := filepath.Join(cfg.LibexecDir, "cube-agent")
	if err := initramfs.BuildFile(l.initrd, initramfs.Config{Agent: agent, ModulesDir: filepath.Join(cfg.KernelDir, "modules"), Release: kernel}); err != nil {
		return fmt.Errorf("build initramfs: %w", err)
	}
	if n.machine, err = n.driver.MachineInfo(ctx); err != nil {
		return fmt.Errorf("QEMU: %w", err)
	}
	n.machine.Kernel = kernel
	if n.machine.Agent, err = agentVersion(agent); err != nil {
		return err
	}
	images, err := image.New(image.Config{Client: n.containerd, ScratchDir: n.pool.ScratchDir(), Log: cfg.Log})
	if err != nil {
		return fmt.Errorf("images: %w", err)
	}
	n.templates, err = template.New(template.Config{
		Dir: n.pool.TemplatesDir(), Images: images, VMMs: n.driver, Network: n.network, Disks: n.pool,
		Guest: guest.New(cfg.Log), Records: newTemplateRecords(n.journal), Machine: n.machine,
		Kernel: filepath.Join(cfg.KernelDir, "vmlinuz"), Initrd: l.initrd, Cmdline: initramfs.Cmdline(),
		Nameservers: n.network.Nameservers(), Limits: n.driver.LimitsFor, Log: cfg.Log,
	})
	if err != nil {
		return fmt.Errorf("templates: %w", err)
	}
	return nil
}

// pruneKeys forgets old idempotency keys until ctx ends.
func (n *node) pruneKeys(ctx context.Context) {
	tick := time.NewTicker(pruneKeysEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if err := n.manager.PruneKeys(ctx); err != nil {
				n.log.Error("prune idempotency keys", "err", err)
			}
		}
	}
}

// handler makes the API over the parts.
func (n *node) handler(cfg Config) http.Handler {
	h := health.NewNode(health.Config{
		Name: cfg.Name, Version: cfg.Version, Machine: n.machine, AccelReason: n.accelReason,
		Usage: n.pool.Usage, Reflink: n.pool.Reflink(),
		Phases: n.manager.Phases, Templates: n.templates.List,
		VMMSlots: n.slots.Waiting, NetSlots: n.network.Waiting,
		Probes: []health.Probe{
			{Type: "StorageWritable", Good: "wrote, cloned and read back on the pool", Run: n.pool.Probe},
			{Type: "JournalWritable", Good: "committed to the journal", Run: n.probeJournal},
			{Type: "ContainerdWorks", Good: "containerd answers", Run: n.probeContainerd},
		},
		ProbeTimeout: probeTimeout, Now: time.Now, Check: n.check,
	})
	return server.New(server.Config{Sandboxes: n.manager, Templates: n.templates, Node: h, Health: h.Healthy, Log: cfg.Log})
}

func (n *node) probeJournal(ctx context.Context) error {
	return n.journal.Commit(ctx, n.probes.PutOp("last", time.Now()))
}

func (n *node) probeContainerd(ctx context.Context) error {
	_, err := n.containerd.Version(ctx)
	return err
}

// listen opens the node's addresses.
func listen(cfg Config) ([]net.Listener, error) {
	unix, err := server.ListenUnix(cfg.Address)
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	if cfg.TLS.Listen == "" {
		return []net.Listener{unix}, nil
	}
	tcp, err := server.ListenTLS(cfg.TLS.Listen, cfg.TLS.Cert, cfg.TLS.Key, cfg.TLS.ClientCA)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen: %w", err), unix.Close())
	}
	return []net.Listener{unix, tcp}, nil
}
