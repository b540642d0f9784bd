package agent

import (
	"os"
	"strconv"
	"strings"
)

// descendants lists the processes that stem from pid, for machines without control
// groups. Those that were re-parented before the call are not found.
func descendants(pid int) []int {
	children := map[int][]int{}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	for _, e := range entries {
		child, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		if err != nil {
			continue
		}
		_, rest, ok := strings.Cut(string(stat), ") ")
		fields := strings.Fields(rest)
		if !ok || len(fields) < 2 {
			continue
		}
		if parent, err := strconv.Atoi(fields[1]); err == nil {
			children[parent] = append(children[parent], child)
		}
	}
	var all []int
	for queue := children[pid]; len(queue) > 0; {
		next := queue[0]
		queue = append(queue[1:], children[next]...)
		all = append(all, next)
	}
	return all
}
