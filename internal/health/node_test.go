package health

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	cube "github.com/cubesandbox/cubelet"
)

func TestConditionsFollowTheProbesAndKeepTheTimeOfChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var broken error
		n := NewNode(Config{
			Name:      "n1",
			Usage:     func() (int64, int64, error) { return 100, 40, nil },
			Phases:    func() map[cube.Phase]int { return map[cube.Phase]int{cube.PhaseRunning: 2} },
			Templates: func(context.Context) ([]cube.Template, error) { return make([]cube.Template, 3), nil },
			VMMSlots:  func() int { return 4 }, NetSlots: func() int { return 5 },
			Probes: []Probe{
				{"StorageWritable", "wrote and read back", func(context.Context) error { return broken }},
				{"JournalWritable", "committed", func(context.Context) error { return nil }},
			},
			ProbeTimeout: time.Second, Now: time.Now,
		})
		begin := time.Now()
		s, err := n.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if s.CPUs == 0 || s.CPUModel == "" || s.MemoryBytes == 0 || s.MemoryAvailable == 0 || s.PoolUsed != 40 || s.Templates != 3 || s.VMMSlots != 4 {
			t.Errorf("status = %+v", s)
		}
		if len(s.Conditions) != 3 || s.Conditions[0].Type != "Ready" || !s.Conditions[0].Status {
			t.Fatalf("conditions = %+v", s.Conditions)
		}
		time.Sleep(time.Minute) // the bubble's clock
		broken = errors.New("disk on fire")
		if s, err = n.Status(t.Context()); err != nil {
			t.Fatal(err)
		}
		want := begin.Add(time.Minute)
		for i, c := range s.Conditions {
			if i < 2 && (c.Status || !c.Since.Equal(want)) {
				t.Errorf("condition %+v; want false since %v", c, want)
			}
			if i == 2 && (!c.Status || !c.Since.Equal(begin)) {
				t.Errorf("condition %+v; want true since %v", c, begin)
			}
		}
		if err := n.Healthy(t.Context()); cube.CodeOf(err) != cube.CodeUnavailable {
			t.Errorf("check = %v", err)
		}
	})
}

func TestAProbeThatHangsIsAFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := NewNode(Config{
			Probes:       []Probe{{"ContainerdWorks", "answered", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }}},
			ProbeTimeout: time.Second, Now: time.Now,
		})
		if err := n.Healthy(t.Context()); err == nil {
			t.Error("a hanging probe counts as healthy")
		}
	})
}
