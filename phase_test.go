package cube_test

import (
	"encoding/json"
	"slices"
	"testing"

	"pgregory.net/rapid"

	cube "github.com/cubesandbox/cubelet"
)

func anyPhase() *rapid.Generator[cube.Phase] { return rapid.SampledFrom(cube.Phases()) }

func TestPhasesAreTheValidOnes(t *testing.T) {
	phases := cube.Phases()
	for n := -3; n < len(phases)+5; n++ {
		p := cube.Phase(n)
		if p.Valid() != slices.Contains(phases, p) {
			t.Errorf("Phase(%d): Valid is %v, in Phases %v", n, p.Valid(), slices.Contains(phases, p))
		}
	}
	if slices.Contains(phases, cube.Phase(0)) {
		t.Error("the zero value is a phase: a record without one would look right")
	}
}

func TestNextAndCanMoveToAgree(t *testing.T) {
	for _, from := range cube.Phases() {
		for _, to := range cube.Phases() {
			if from.CanMoveTo(to) != slices.Contains(from.Next(), to) {
				t.Errorf("%s to %s: CanMoveTo %v, Next %v", from, to, from.CanMoveTo(to), from.Next())
			}
		}
		if from.CanMoveTo(0) || cube.Phase(0).CanMoveTo(from) {
			t.Errorf("%s can move from or to no phase", from)
		}
	}
}

func TestCallersCannotChangeTheTable(t *testing.T) {
	next := cube.PhaseCreating.Next()
	for i := range next {
		next[i] = cube.PhaseStopped
	}
	if cube.PhaseCreating.CanMoveTo(cube.PhaseStopped) {
		t.Error("the table was changed through Next")
	}
}

// TestEveryWalkCanEndInDeletion walks at random and asks what a user needs: wherever a
// sandbox is, it can be deleted, now or after the failure of the deletion under way, and
// it may fail.
func TestEveryWalkCanEndInDeletion(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := cube.PhaseCreating
		for range rapid.IntRange(0, 30).Draw(t, "length") {
			p = rapid.SampledFrom(p.Next()).Draw(t, "next")
			if p == cube.PhaseCreating {
				t.Fatal("a sandbox is created twice")
			}
			switch {
			case p == cube.PhaseDeleting:
				if next := p.Next(); !slices.Equal(next, []cube.Phase{cube.PhaseFailed}) {
					t.Fatalf("a deletion can be followed by %v", next)
				}
			case !p.CanMoveTo(cube.PhaseDeleting):
				t.Fatalf("%s cannot be deleted", p)
			case p != cube.PhaseFailed && !p.CanMoveTo(cube.PhaseFailed):
				t.Fatalf("%s cannot fail", p)
			}
		}
	})
}

func TestEveryPhaseIsReached(t *testing.T) {
	seen := map[cube.Phase]bool{cube.PhaseCreating: true}
	for todo := []cube.Phase{cube.PhaseCreating}; len(todo) > 0; todo = todo[1:] {
		for _, to := range todo[0].Next() {
			if !seen[to] {
				seen[to] = true
				todo = append(todo, to)
			}
		}
	}
	for _, p := range cube.Phases() {
		if !seen[p] {
			t.Errorf("%s is never reached", p)
		}
		if p.CanMoveTo(p) {
			t.Errorf("%s moves to itself", p)
		}
	}
}

func TestPhaseTextRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := anyPhase().Draw(t, "phase")
		b, err := json.Marshal(map[cube.Phase]cube.Phase{p: p})
		if err != nil {
			t.Fatal(err)
		}
		var got map[cube.Phase]cube.Phase
		if err := json.Unmarshal(b, &got); err != nil || got[p] != p {
			t.Fatalf("%s became %v, %v", b, got, err)
		}
		parsed, err := cube.ParsePhase(p.String())
		if err != nil || parsed != p {
			t.Fatalf("ParsePhase(%s) = %v, %v", p, parsed, err)
		}
	})
}

func TestNoPhaseIsRefused(t *testing.T) {
	if _, err := json.Marshal(cube.Sandbox{}); err == nil {
		t.Error("a record without a phase was encoded")
	}
	for _, text := range []string{"", "deleted", "Running", "running "} {
		if p, err := cube.ParsePhase(text); cube.CodeOf(err) != cube.CodeInvalid {
			t.Errorf("ParsePhase(%q) = %v, %v; want Invalid", text, p, err)
		}
		var p cube.Phase
		if err := p.UnmarshalText([]byte(text)); err == nil || p != 0 {
			t.Errorf("UnmarshalText(%q) = %v, %v", text, p, err)
		}
	}
	defer func() {
		if recover() == nil {
			t.Error("String of no phase did not panic")
		}
	}()
	_ = cube.Phase(0).String()
}
