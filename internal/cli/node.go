package cli

import (
	"fmt"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

func (a *app) node() *cobra.Command {
	return group("node", "Look at the node itself", "  cubecli node status", a.nodeStatus())
}

func (a *app) nodeStatus() *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show what the node measured of itself",
		Example: `  cubecli node status
  cubecli node status -o json | jq '.conditions[] | select(.status | not)'`,
		Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.dial()
			if err != nil {
				return err
			}
			ctx, cancel := a.call(cmd)
			defer cancel()
			res, err := c.node.GetNodeStatus(ctx, connect.NewRequest(&cubev1.GetNodeStatusRequest{}))
			if err != nil {
				return during("get node status", err)
			}
			return a.showStatus(res.Msg.GetStatus())
		},
	}
}

func (a *app) showStatus(s *cubev1.NodeStatus) error {
	switch {
	case a.quiet:
		return a.ids(s.GetName())
	case a.machine():
		return a.document(s)
	}
	m := s.GetMachine()
	err := fields(a.stdout,
		[2]string{"Node", s.GetName()},
		[2]string{"Cubelet", s.GetVersion().GetCubelet() + ", started " + ago(s.GetStartedAt())},
		[2]string{"CPUs", fmt.Sprintf("%d (%s), load %.2f", s.GetCpus(), s.GetCpuModel(), s.GetLoad1())},
		[2]string{"Memory", fmt.Sprintf("%s, %s available", bytesName(s.GetMemoryBytes()), bytesName(s.GetMemoryAvailableBytes()))},
		[2]string{"Pool", poolName(s)},
		[2]string{"Accelerator", strings.TrimSuffix(m.GetAccelerator()+": "+s.GetAcceleratorReason(), ": ")},
		[2]string{"Machine", fmt.Sprintf("QEMU %s %s, CPU %s, kernel %s, agent %s", m.GetQemu(), m.GetMachineType(), m.GetCpuModel(), m.GetKernel(), m.GetAgent())},
		[2]string{"Sandboxes", phaseCounts(s.GetPhases())},
		[2]string{"Templates", fmt.Sprint(s.GetTemplates())},
		[2]string{"Slots waiting", fmt.Sprintf("%d VMM, %d network", s.GetVmmSlots(), s.GetNetworkSlots())},
	)
	if err != nil || len(s.GetConditions()) == 0 {
		return err
	}
	fmt.Fprintln(a.stdout)
	rows := make([][]string, len(s.GetConditions()))
	for i, c := range s.GetConditions() {
		ok := "no"
		if c.GetStatus() {
			ok = "yes"
		}
		rows[i] = []string{c.GetType(), ok, ago(c.GetSince()), c.GetReason()}
	}
	return table(a.stdout, "CONDITION OK SINCE REASON", rows)
}

func poolName(s *cubev1.NodeStatus) string {
	used := int64(0)
	if s.GetPoolBytes() > 0 {
		used = s.GetPoolUsedBytes() * 100 / s.GetPoolBytes()
	}
	text := fmt.Sprintf("%s of %s used (%d%%)", bytesName(s.GetPoolUsedBytes()), bytesName(s.GetPoolBytes()), used)
	if !s.GetPoolReflink() {
		text += ", no reflinks"
	}
	return text
}

func phaseCounts(list []*cubev1.PhaseCount) string {
	if len(list) == 0 {
		return "none"
	}
	parts := make([]string, len(list))
	for i, p := range list {
		parts[i] = fmt.Sprintf("%d %s", p.GetCount(), phaseName(p.GetPhase()))
	}
	return strings.Join(parts, ", ")
}
