package server

import (
	cube "github.com/cubesandbox/cubelet"
	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

func fromVersion(v cube.Version) *cubev1.Version {
	return &cubev1.Version{Cubelet: v.Cubelet, Commit: v.Commit, Go: v.Go, Api: v.API}
}

func fromNodeStatus(s cube.NodeStatus) *cubev1.NodeStatus {
	return &cubev1.NodeStatus{
		Name:                 s.Name,
		Version:              fromVersion(s.Version),
		StartedAt:            fromTime(s.StartedAt),
		Cpus:                 count(s.CPUs),
		CpuModel:             valid(s.CPUModel),
		Load1:                s.Load1,
		MemoryBytes:          s.MemoryBytes,
		MemoryAvailableBytes: s.MemoryAvailable,
		PoolBytes:            s.PoolBytes,
		PoolUsedBytes:        s.PoolUsed,
		PoolReflink:          s.PoolReflink,
		Machine:              fromMachine(s.Machine),
		AcceleratorReason:    valid(s.AcceleratorReason),
		Phases:               fromPhaseCounts(s.Phases),
		Templates:            count(s.Templates),
		VmmSlots:             count(s.VMMSlots),
		NetworkSlots:         count(s.NetworkSlots),
		Conditions:           fromConditions(s.Conditions),
	}
}

// fromPhaseCounts lists the phases that occur, in the order of the phase table.
func fromPhaseCounts(m map[cube.Phase]int) []*cubev1.PhaseCount {
	var out []*cubev1.PhaseCount
	for _, p := range cube.Phases() {
		if n := m[p]; n > 0 {
			out = append(out, &cubev1.PhaseCount{Phase: fromPhase(p), Count: count(n)})
		}
	}
	return out
}

func fromConditions(in []cube.Condition) []*cubev1.Condition {
	out := make([]*cubev1.Condition, len(in))
	for i, c := range in {
		out[i] = &cubev1.Condition{Type: c.Type, Status: c.Status, Reason: valid(c.Reason), Since: fromTime(c.Since)}
	}
	return out
}
