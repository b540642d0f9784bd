package daemon

import (
	"context"
	"fmt"
	"maps"
	"slices"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/storage"
)

// check compares journal, disk and kernel.
func (n *node) check(ctx context.Context) ([]cube.Finding, error) {
	busy, building := n.templates.Busy()
	findings, err := n.manager.Check(ctx, func(owner string) bool { return busy[owner] })
	if err != nil {
		return nil, fmt.Errorf("check sandboxes: %w", err)
	}
	owners := slices.AppendSeq(n.manager.IDs(), maps.Keys(busy))
	netOwners, err := n.networkOwners(ctx, owners)
	if err != nil {
		return nil, err
	}
	for _, f := range n.network.Check(ctx, netOwners) {
		findings = append(findings, cube.Finding{Part: "network", Detail: f})
	}
	templates, err := n.templates.List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list templates: %w", err)
	}
	known := storage.Known{Owners: owners, Templates: building, ScratchInUse: len(busy) > 0}
	for _, t := range templates {
		known.Templates = append(known.Templates, t.ID)
	}
	pool, err := n.pool.Check(ctx, known)
	if err != nil {
		return nil, err
	}
	for _, f := range pool {
		findings = append(findings, cube.Finding{Part: "pool", Object: f.Path, Detail: f.Problem})
	}
	for _, q := range n.journal.Quarantined() {
		findings = append(findings, cube.Finding{Part: "journal", Object: q.Bucket + "/" + q.Key + q.Path, Detail: "set aside: " + q.Reason})
	}
	return findings, nil
}

// networkOwners lists who may have a network, and the running sandboxes, which must.
func (n *node) networkOwners(ctx context.Context, known []string) ([]string, error) {
	have, err := n.network.List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list networks: %w", err)
	}
	owners := map[string]bool{}
	for _, o := range have {
		owners[o] = slices.Contains(known, o)
	}
	for _, s := range n.manager.Settled() {
		owners[s.ID] = owners[s.ID] || s.Phase == cube.PhaseRunning
	}
	maps.DeleteFunc(owners, func(_ string, may bool) bool { return !may })
	return slices.Sorted(maps.Keys(owners)), nil
}
