package sandbox

import (
	"fmt"
	"maps"
	"slices"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// Observed is what the host really has, by owner.
type Observed struct {
	VMMs     map[string]vmm.Instance // with process 0 when the VMM is dead
	Networks map[string]bool
	Disks    map[string]bool
}

// ActionKind says what recovery does about one owner.
type ActionKind string

// The kinds of actions.
const (
	// ActionAdopt goes on with a running sandbox.
	ActionAdopt ActionKind = "adopt"
	// ActionUnwind undoes a create that the daemon did not finish, and drops the record.
	ActionUnwind ActionKind = "unwind"
	// ActionFinish ends a delete that the daemon did not finish.
	ActionFinish ActionKind = "finish-delete"
	// ActionFail marks a sandbox as failed whose VMM or network is gone.
	ActionFail ActionKind = "fail"
	// ActionKeep keeps a record as it is, for its owner to delete.
	ActionKeep ActionKind = "keep"
	// ActionRemove removes the host objects of an owner that has no record.
	ActionRemove ActionKind = "remove"
)

// Action is one decision of recovery.
type Action struct {
	Kind   ActionKind
	ID     string
	Reason string
}

// reconcile compares the records with the host and decides. It is pure; the actions
// are in the order of the IDs.
func reconcile(records map[string]Record, seen Observed) []Action {
	var actions []Action
	for _, id := range slices.Sorted(maps.Keys(records)) {
		r := records[id]
		actions = append(actions, decide(&r, seen))
	}
	return append(actions, strays(records, seen)...)
}

func decide(r *Record, seen Observed) Action {
	a := Action{ID: r.ID}
	switch r.Phase {
	case cube.PhaseCreating:
		a.Kind, a.Reason = ActionUnwind, "the daemon stopped while it was being created"
	case cube.PhaseDeleting:
		a.Kind, a.Reason = ActionFinish, "the daemon stopped while it was being deleted"
	case cube.PhaseRunning:
		a.Kind, a.Reason = ActionAdopt, "running"
		if why := lost(r, seen); why != "" {
			a.Kind, a.Reason = ActionFail, why
		}
	case cube.PhaseFailed, cube.PhasePausing, cube.PhasePaused, cube.PhaseResuming, cube.PhaseStopping, cube.PhaseStopped:
		a.Kind, a.Reason = ActionKeep, r.Phase.String()
	default:
		a.Kind, a.Reason = ActionKeep, "its phase is unknown"
	}
	return a
}

// lost says why a running sandbox cannot go on, or nothing.
func lost(r *Record, seen Observed) string {
	inst, ok := seen.VMMs[r.ID]
	switch {
	case !ok:
		return "its VMM is gone"
	case inst.Process.PID == 0:
		return "its VMM exited while the daemon was down"
	case inst.Process != r.Instance.Process:
		return fmt.Sprintf("its VMM is process %d started at %d, expected %d started at %d",
			inst.Process.PID, inst.Process.StartTime, r.Instance.Process.PID, r.Instance.Process.StartTime)
	case !seen.Networks[r.ID]:
		return "its network namespace is gone"
	case !seen.Disks[r.ID]:
		return "its disk is gone"
	}
	return ""
}

// strays finds owners without a record.
func strays(records map[string]Record, seen Observed) []Action {
	ids := map[string]bool{}
	for id := range seen.VMMs {
		ids[id] = true
	}
	maps.Copy(ids, seen.Networks)
	maps.Copy(ids, seen.Disks)
	var actions []Action
	for _, id := range slices.Sorted(maps.Keys(ids)) {
		if _, ok := records[id]; !ok {
			actions = append(actions, Action{ActionRemove, id, "no record of it"})
		}
	}
	return actions
}
