package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"

	"connectrpc.com/connect"

	cube "github.com/cubesandbox/cubelet"
	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
	"github.com/cubesandbox/cubelet/internal/hostmount"
	"github.com/cubesandbox/cubelet/networkagent"
	"github.com/cubesandbox/cubelet/storage"
)

// Check asks the running node what does not fit. Codes: Unavailable when none runs.
func Check(ctx context.Context, cfg Config) ([]cube.Finding, error) {
	client := nodeClient(cfg.Address)
	res, err := client.CheckNode(ctx, connect.NewRequest(&cubev1.CheckNodeRequest{}))
	if err != nil {
		return nil, cube.Errorf(cube.CodeUnavailable, "ask the node at %s: %w", cfg.Address, err).
			WithHint("start it with `cubelet serve --root %s`", cfg.Root)
	}
	findings := []cube.Finding{}
	for _, f := range res.Msg.Findings {
		findings = append(findings, cube.Finding{Part: f.Part, Object: f.Object, Detail: f.Detail})
	}
	return findings, nil
}

// Purge destroys what a stopped node has in the kernel: VMMs, namespaces, links, rules
// and the pool's mount. The process is in the node's mount namespace. The files below
// the root stay; see RemoveRoot.
func Purge(ctx context.Context, cfg Config) (err error) {
	l := cfg.layout()
	lock, err := openRoot(l)
	if err != nil {
		return err
	}
	defer lock.Close()
	var close closers
	defer func() { err = errors.Join(err, close.run()) }()
	n := &node{log: cfg.Log}
	if err := n.openVMMs(ctx, cfg, l, nil, &close); err != nil {
		return fmt.Errorf("destroy VMMs: %w", err)
	}
	n.network, err = networkagent.New(networkagent.Config{RunDir: l.net, Node: cfg.tag(), HostPrefix: cfg.HostPrefix, Log: cfg.Log})
	if err != nil {
		return fmt.Errorf("network agent: %w", err)
	}
	if err := errors.Join(n.network.Adopt(ctx, nil), n.network.Close()); err != nil {
		return fmt.Errorf("destroy networks: %w", err)
	}
	if _, err := os.Stat(l.poolImage); errors.Is(err, os.ErrNotExist) {
		return nil // the pool is a part of the host's file system, or was never made
	}
	pool, err := storage.OpenPool(ctx, storage.Config{Dir: l.pool, Image: l.poolImage, SizeBytes: cfg.PoolBytes, Log: cfg.Log})
	if err != nil {
		return fmt.Errorf("open pool: %w", err)
	}
	return pool.Close(true)
}

// RemoveRoot ends the node's mount namespace and deletes its files. The process is in
// the host's mount namespace, and Purge was successful.
func RemoveRoot(cfg Config) error {
	l := cfg.layout()
	if err := hostmount.Release(l.mnt); err != nil {
		return err
	}
	for _, path := range []string{
		l.run, l.containerd, l.pool, l.poolImage, l.journal, l.journal + ".lock",
		l.initrd, l.initrd + ".digest", l.root,
	} {
		if err := os.RemoveAll(path); err != nil {
			return fmt.Errorf("remove %s: %w", path, err)
		}
	}
	return nil
}
