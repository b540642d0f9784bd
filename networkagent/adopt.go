package networkagent

import (
	"context"
	"errors"
	"maps"
	"slices"
)

// Adopt takes over after an earlier daemon: slots of these owners stay as they are, all
// else of this node that this Agent did not make is destroyed, and the host's rules are
// put right. Call it before claims. What cannot be destroyed is reported and does not
// keep the rest from it.
func (a *Agent) Adopt(ctx context.Context, owners []string) error {
	var errs []error
	for _, owner := range a.unwanted(owners) {
		a.log.Info("releasing a network slot without a sandbox", "owner", owner)
		errs = append(errs, a.Release(ctx, owner))
	}
	for _, name := range a.leftovers() {
		a.log.Info("removing what is left of a network slot", "slot", name)
		errs = append(errs, a.destroy(name))
	}
	errs = append(errs, a.records.sweep())
	repaired, err := repairHost(a.cfg, a.prefix)
	for _, what := range repaired {
		a.log.Warn("repaired the host's network set-up", "found", what)
	}
	errs = append(errs, err)
	return errors.Join(errs...)
}

// unwanted returns the owners of an earlier daemon that are not among keep.
func (a *Agent) unwanted(keep []string) []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	var out []string
	for owner, c := range a.owners {
		if c.adopted && !slices.Contains(keep, owner) {
			out = append(out, owner)
		}
	}
	slices.Sort(out)
	return out
}

// leftovers returns the slots of an earlier daemon that no owner has.
func (a *Agent) leftovers() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	owned := map[string]bool{}
	for _, c := range a.owners {
		if c.adopted {
			owned[c.record.Slot] = true
		}
	}
	var out []string
	for _, name := range slices.Sorted(maps.Keys(a.names)) {
		if !a.names[name] && !owned[name] {
			out = append(out, name)
		}
	}
	return out
}
