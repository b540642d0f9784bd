package cube

import "fmt"

// Phase is the state of a sandbox.
type Phase int

// The phases. There is no "deleted": a deleted sandbox has no record.
const (
	PhaseCreating Phase = iota + 1
	PhaseRunning
	PhasePausing
	PhasePaused
	PhaseResuming
	PhaseStopping
	PhaseStopped
	PhaseDeleting
	PhaseFailed
)

var phaseNames = [...]string{
	PhaseCreating: "creating",
	PhaseRunning:  "running",
	PhasePausing:  "pausing",
	PhasePaused:   "paused",
	PhaseResuming: "resuming",
	PhaseStopping: "stopping",
	PhaseStopped:  "stopped",
	PhaseDeleting: "deleting",
	PhaseFailed:   "failed",
}

// transitions is the one phase table: from each phase, the phases it may move to.
// docs/states.md is generated from it.
var transitions = map[Phase][]Phase{
	PhaseCreating: {PhaseRunning, PhaseDeleting, PhaseFailed},
	PhaseRunning:  {PhasePausing, PhaseResuming, PhaseStopping, PhaseDeleting, PhaseFailed},
	PhasePausing:  {PhasePaused, PhaseRunning, PhaseDeleting, PhaseFailed},
	PhasePaused:   {PhaseResuming, PhaseDeleting, PhaseFailed},
	PhaseResuming: {PhaseRunning, PhasePaused, PhaseStopped, PhaseDeleting, PhaseFailed},
	PhaseStopping: {PhaseStopped, PhaseRunning, PhaseDeleting, PhaseFailed},
	PhaseStopped:  {PhaseResuming, PhaseDeleting, PhaseFailed},
	PhaseDeleting: {PhaseFailed},
	PhaseFailed:   {PhaseDeleting, PhaseResuming},
}

// Phases lists every phase in the table's order.
func Phases() []Phase {
	all := make([]Phase, 0, len(phaseNames)-1)
	for p := PhaseCreating; p <= PhaseFailed; p++ {
		all = append(all, p)
	}
	return all
}

// Next lists the phases that p may move to.
func (p Phase) Next() []Phase { return append([]Phase(nil), transitions[p]...) }

// CanMoveTo reports whether the table allows the move.
func (p Phase) CanMoveTo(to Phase) bool {
	for _, n := range transitions[p] {
		if n == to {
			return true
		}
	}
	return false
}

// Valid reports whether p is one of the phases.
func (p Phase) Valid() bool { return p >= PhaseCreating && p <= PhaseFailed }

// String names the phase. It panics on a value that is no phase, since such a
// value can only come from a programming error; decoders use ParsePhase.
func (p Phase) String() string {
	if !p.Valid() {
		panic(fmt.Sprintf("cube: no phase %d", int(p)))
	}
	return phaseNames[p]
}

// ParsePhase is the inverse of String. Its error is of CodeInvalid.
func ParsePhase(s string) (Phase, error) {
	for p := PhaseCreating; p <= PhaseFailed; p++ {
		if phaseNames[p] == s {
			return p, nil
		}
	}
	return 0, Errorf(CodeInvalid, "no phase %q", s)
}

// MarshalText writes the phase's name; a record that holds no phase is refused.
func (p Phase) MarshalText() ([]byte, error) {
	if !p.Valid() {
		return nil, Errorf(CodeInternal, "no phase %d", int(p))
	}
	return []byte(phaseNames[p]), nil
}

// UnmarshalText reads a phase's name.
func (p *Phase) UnmarshalText(b []byte) error {
	v, err := ParsePhase(string(b))
	if err != nil {
		return err
	}
	*p = v
	return nil
}
