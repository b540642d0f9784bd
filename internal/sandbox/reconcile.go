package sandbox

import (
	"fmt"
	"maps"
	"slices"
	"strings"

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
	// ActionGoOn lets a machine go on that a verb had stopped and not finished with.
	ActionGoOn ActionKind = "go-on"
	// ActionLetGo frees what a paused sandbox still has of the host.
	ActionLetGo ActionKind = "let-go"
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
	case cube.PhaseRunning, cube.PhasePausing:
		a = decideAlive(r, seen, ActionAdopt)
	case cube.PhaseResuming:
		a = decideResuming(r, seen)
	case cube.PhasePaused:
		a = decidePaused(r, seen)
	case cube.PhaseFailed, cube.PhaseStopping, cube.PhaseStopped:
		a.Kind, a.Reason = ActionKeep, r.Phase.String()
	default:
		a.Kind, a.Reason = ActionKeep, "its phase is unknown"
	}
	return a
}

// decideAlive is for a sandbox that is nothing without its VMM. What a verb that was cut
// off did is undone: the machine goes on.
func decideAlive(r *Record, seen Observed, kind ActionKind) Action {
	if why := lost(r, seen); why != "" {
		return Action{ActionFail, r.ID, why}
	}
	if r.Phase != cube.PhaseRunning && kind == ActionAdopt {
		return Action{ActionGoOn, r.ID, "the daemon stopped while it was " + r.Phase.String()}
	}
	return Action{kind, r.ID, r.Phase.String()}
}

// decideResuming is for a resume or a rollback that was cut off.
func decideResuming(r *Record, seen Observed) Action {
	if r.Paused == cube.PauseFull {
		return Action{ActionLetGo, r.ID, "the daemon stopped while it was being resumed"}
	}
	return decideAlive(r, seen, ActionAdopt)
}

func decidePaused(r *Record, seen Observed) Action {
	switch {
	case r.Paused == cube.PauseKeepMemory:
		return decideAlive(r, seen, ActionKeep)
	case !seen.Disks[r.ID]:
		return Action{ActionFail, r.ID, "its disk is gone"}
	case seen.hasVMM(r.vmm()) || seen.Networks[r.ID]:
		return Action{ActionLetGo, r.ID, "the daemon stopped before it had freed its memory and network"}
	}
	return Action{ActionKeep, r.ID, r.Phase.String()}
}

func (o Observed) hasVMM(owner string) bool {
	_, ok := o.VMMs[owner]
	return ok
}

// lost says why a running sandbox cannot go on, or nothing.
func lost(r *Record, seen Observed) string {
	inst, ok := seen.VMMs[r.vmm()]
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
		if !ownedBy(id, records) {
			actions = append(actions, Action{ActionRemove, id, "no record of it"})
		}
	}
	return actions
}

// ownedBy tells whether an owner's objects are of the generation that its record names, or
// of the one that a verb is making.
func ownedBy(owner string, records map[string]Record) bool {
	id, _, _ := strings.Cut(owner, "-")
	if r, ok := records[id]; ok {
		return owner == r.ID || owner == r.vmm() || owner == vmmOwner(r.ID, r.Generation+1) || owner == vmmOwner(r.ID, r.Generation-1)
	}
	_, ok := records[owner]
	return ok
}
