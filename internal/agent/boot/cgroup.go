package boot

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Control groups of the guest: the agent lives in one, everything it runs below the
// other. PID 1 is never a victim of the out-of-memory killer, so the agent needs no
// oom_score_adj, which its children would inherit; a share of the CPU and some memory
// are kept for it so that it answers when the programs have used up the rest.
const (
	cgroupRoot = "/sys/fs/cgroup"
	agentGroup = cgroupRoot + "/agent"
)

// reserve is the memory, in bytes, that programs leave for the agent and the kernel.
func reserve(total uint64) uint64 {
	return min(max(total/16, 16<<20), 64<<20)
}

func setUpCgroups() error {
	for _, dir := range [...]string{agentGroup, CgroupDir} {
		if err := os.Mkdir(dir, 0o755); err != nil && !os.IsExist(err) {
			return err
		}
	}
	write := func(dir, file, value string) error {
		return os.WriteFile(filepath.Join(dir, file), []byte(value), 0)
	}
	if err := write(agentGroup, "cgroup.procs", "1"); err != nil {
		return err
	}
	var errs []error
	for _, controller := range [...]string{"cpu", "memory", "pids"} {
		errs = append(errs, write(cgroupRoot, "cgroup.subtree_control", "+"+controller))
	}
	errs = append(errs, write(agentGroup, "cpu.weight", "10000"))
	if total := memTotal(); total > 0 {
		keep := reserve(total)
		errs = append(errs,
			write(agentGroup, "memory.min", strconv.FormatUint(keep, 10)),
			write(CgroupDir, "memory.max", strconv.FormatUint(total-keep, 10)))
	}
	if max := readNumber("/proc/sys/kernel/threads-max"); max > 0 {
		errs = append(errs, write(CgroupDir, "pids.max", strconv.FormatUint(max-max/8, 10)))
	}
	return errors.Join(errs...)
}

func readNumber(path string) uint64 {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	return n
}

// memTotal returns the machine's memory in bytes, 0 when unknown.
func memTotal() uint64 {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	rest, ok := strings.CutPrefix(string(b), "MemTotal:")
	fields := strings.Fields(rest)
	if !ok || len(fields) == 0 {
		return 0
	}
	n, _ := strconv.ParseUint(fields[0], 10, 64)
	return n << 10
}
