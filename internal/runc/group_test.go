package runc

import (
	"context"
	"testing"
	"testing/synctest"
)

func TestOnlyOneCreateFoundsAGroup(t *testing.T) {
	var g groups
	first, second := g.join(false), g.join(false)
	if first == second {
		t.Fatal("two creates share a group that has no living member")
	}
	g.joined(first, true)
	if third := g.join(false); third != first {
		t.Error("a group with a living member and room is not used")
	}
	if fresh := g.join(true); fresh == first || fresh == second {
		t.Error("a fresh group was asked for")
	}
}

func TestGroupsHaveABound(t *testing.T) {
	var g groups
	sizes := map[*group]int{}
	for range 3*groupSize + 1 {
		gr := g.join(false)
		g.joined(gr, true)
		sizes[gr]++
	}
	for gr, n := range sizes {
		if n > groupSize {
			t.Errorf("group %s has %d members", gr.id, n)
		}
	}
	if len(sizes) != 4 {
		t.Errorf("%d groups", len(sizes))
	}
}

func TestLastMemberWaitsForCreatesBeforeItLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var g groups
		gr := g.join(false)
		g.joined(gr, true)
		if g.join(false) != gr {
			t.Fatal("not joined")
		}
		left := make(chan error, 1)
		go func() { left <- g.leave(t.Context(), gr) }()
		synctest.Wait()
		select {
		case <-left:
			t.Fatal("the last living member left while a create ran in its group")
		default:
		}
		if g.join(false) == gr {
			t.Error("a group whose last living member leaves takes newcomers")
		}
		g.joined(gr, true)
		if err := <-left; err != nil {
			t.Error(err)
		}
	})
}

func TestLeaveThatIsGivenUpCanBeRepeated(t *testing.T) {
	var g groups
	gr := g.join(false)
	g.joined(gr, true)
	g.join(false)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := g.leave(ctx, gr); err == nil {
		t.Fatal("left while a create ran")
	}
	g.joined(gr, false)
	if err := g.leave(t.Context(), gr); err != nil || gr.live != 0 || len(g.open) != 0 {
		t.Errorf("%v, %+v, %d open", err, gr, len(g.open))
	}
}

func TestFailedFounderRemovesItsGroup(t *testing.T) {
	var g groups
	g.joined(g.join(false), false)
	if len(g.open) != 0 {
		t.Errorf("%d open groups", len(g.open))
	}
}
