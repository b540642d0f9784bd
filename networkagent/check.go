package networkagent

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/google/nftables"
)

// Check lists in words what of this node's network does not fit its owners (the
// sandboxes that should have a slot): what nobody owns, what is missing, what was
// changed on the host. Empty when all is well. It changes nothing.
func (a *Agent) Check(ctx context.Context, owners []string) []string {
	a.mu.Lock()
	mine := map[string]bool{}
	for name, made := range a.names {
		mine[name] = made
	}
	for owner, c := range a.owners {
		select {
		case <-c.settled:
			delete(mine, c.record.Slot) // judged by its record
		default:
			owners = append(slices.Clip(owners), owner) // about to be handed out
		}
	}
	a.mu.Unlock()
	found, err := inspect(a.cfg, owners, mine)
	if err == nil {
		var more []string
		more, err = hostDiffers(a.cfg, a.prefix)
		found = append(found, more...)
	}
	if err != nil {
		found = append(found, fmt.Sprintf("cannot check the network: %v", err))
	}
	return found
}

// Inspect is Check for a node whose daemon does not run.
func Inspect(cfg Config, owners []string) ([]string, error) {
	cfg, err := cfg.complete()
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(cfg.RunDir); os.IsNotExist(err) {
		return nil, nil // never started since boot
	}
	return inspect(cfg, owners, nil)
}

// inspect compares records, namespaces and links with owners, leaving out slots that
// are known to be in the making or waiting.
func inspect(cfg Config, owners []string, known map[string]bool) ([]string, error) {
	recorded, err := cfg.records().list()
	if err != nil {
		return nil, err
	}
	names, err := existing(cfg)
	if err != nil {
		return nil, err
	}
	links, err := hostLinks()
	if err != nil {
		return nil, err
	}
	var found []string
	slotOf := map[string]string{}
	for _, owner := range slices.Sorted(maps.Keys(recorded)) {
		r := recorded[owner]
		slotOf[r.Slot] = owner
		if !slices.Contains(owners, owner) {
			found = append(found, fmt.Sprintf("network slot %s belongs to %s, which is no sandbox", r.Slot, owner))
			continue
		}
		for _, what := range missing(cfg, r, links) {
			found = append(found, fmt.Sprintf("%s of sandbox %s is missing", what, owner))
		}
	}
	for _, owner := range owners {
		if _, ok := recorded[owner]; !ok {
			found = append(found, fmt.Sprintf("sandbox %s has no network slot", owner))
		}
	}
	for _, name := range names {
		if _, ok := slotOf[name]; !ok && !known[name] {
			found = append(found, fmt.Sprintf("network slot %s belongs to nobody", name))
		}
	}
	return found, nil
}

func missing(cfg Config, r record, links map[string]bool) []string {
	if r.Slot == "" {
		return []string{"the network record"}
	}
	var out []string
	ns, err := openNamespace(cfg.slotPath(r.Slot))
	if err != nil {
		out = append(out, "network namespace "+cfg.slotPath(r.Slot))
	} else {
		ns.Close()
	}
	if !links[r.Slot] {
		out = append(out, "link "+r.Slot)
	}
	return out
}

func hostLinks() (map[string]bool, error) {
	nl, err := newRoutes()
	if err != nil {
		return nil, err
	}
	defer nl.Close()
	byIndex, err := linkNames(nl)
	if err != nil {
		return nil, err
	}
	set := map[string]bool{}
	for _, name := range byIndex {
		set[name] = true
	}
	return set, nil
}

// Obstacles lists in words what else on this host may keep sandboxes from reaching the
// network: packets pass only if every firewall on the host lets them.
func Obstacles() ([]string, error) {
	conn, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("read nftables: %w", err)
	}
	chains, err := conn.ListChains()
	if err != nil {
		return nil, fmt.Errorf("read nftables chains: %w", err)
	}
	var found []string
	for _, c := range chains {
		if c.Hooknum == nil || *c.Hooknum != *nftables.ChainHookForward || c.Policy == nil ||
			*c.Policy != nftables.ChainPolicyDrop || strings.HasPrefix(c.Table.Name, tablePrefix) || !forwardsIPv4(c.Table) {
			continue
		}
		found = append(found, fmt.Sprintf("chain %s of nftables table %s drops forwarded packets by default: "+
			"let packets from and to links named cl* pass there, or sandboxes reach nothing", c.Name, c.Table.Name))
	}
	b, err := os.ReadFile("/proc/net/ip_tables_names")
	if err == nil && slices.Contains(strings.Fields(string(b)), "filter") {
		found = append(found, "legacy iptables filters packets: let packets from and to links named cl* pass "+
			"its FORWARD chain, or sandboxes may reach nothing")
	}
	return found, nil
}

func forwardsIPv4(t *nftables.Table) bool {
	return t.Family == nftables.TableFamilyINet || t.Family == nftables.TableFamilyIPv4
}
