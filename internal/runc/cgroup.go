package runc

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/containerd/cgroups/v3"
	"github.com/containerd/cgroups/v3/cgroup1"
	"github.com/containerd/cgroups/v3/cgroup2"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/cubesandbox/cubelet/internal/vmm"
)

const (
	cgroupRoot    = "/sys/fs/cgroup"
	cpuPeriod     = 100_000 // microseconds
	usPerMilliCPU = cpuPeriod / 1000
)

// applyLimits writes the limits straight into the cgroup: `runc update` would cost a
// process and 30 ms.
func applyLimits(path string, l vmm.Limits) error {
	r := limitResources(l)
	if cgroups.Mode() == cgroups.Unified {
		cg, err := cgroup2.Load(path)
		if err != nil {
			return fmt.Errorf("load cgroup %s: %w", path, err)
		}
		if err := cg.Update(cgroup2.ToResources(r)); err != nil {
			return fmt.Errorf("limit cgroup %s: %w", path, err)
		}
		return nil
	}
	cg, err := cgroup1.Load(cgroup1.StaticPath(path))
	if err != nil {
		return fmt.Errorf("load cgroup %s: %w", path, err)
	}
	if err := cg.Update(r); err != nil {
		return fmt.Errorf("limit cgroup %s: %w", path, err)
	}
	return nil
}

func limitResources(l vmm.Limits) *specs.LinuxResources {
	pids := int64(l.PIDs)
	r := &specs.LinuxResources{
		Memory: &specs.LinuxMemory{Limit: &l.MemoryBytes},
		Pids:   &specs.LinuxPids{Limit: &pids},
	}
	if l.MilliCPUs > 0 {
		quota, period := int64(l.MilliCPUs)*usPerMilliCPU, uint64(cpuPeriod)
		r.CPU = &specs.LinuxCPU{Quota: &quota, Period: &period}
	}
	return r
}

// cgroupDirs lists the directories of a cgroup, one per hierarchy; some may not exist.
func cgroupDirs(group string) ([]string, error) {
	dirs := []string{filepath.Join(cgroupRoot, group)}
	if cgroups.Mode() == cgroups.Unified {
		return dirs, nil
	}
	entries, err := os.ReadDir(cgroupRoot)
	if err != nil {
		return nil, fmt.Errorf("list cgroup hierarchies: %w", err)
	}
	for _, e := range entries {
		dirs = append(dirs, filepath.Join(cgroupRoot, e.Name(), group))
	}
	return dirs, nil
}

// removeCgroupParent removes the parent of all slots from every hierarchy. One that
// still has a slot below it stays.
func removeCgroupParent(parent string) error {
	if parent == "" || parent == "/" {
		return nil
	}
	dirs, err := cgroupDirs(parent)
	if err != nil {
		return err
	}
	var errs []error
	for _, dir := range dirs {
		if !hasChildren(dir) {
			errs = append(errs, removeCgroupDir(dir))
		}
	}
	return errors.Join(errs...)
}

// removeStrayCgroups removes the cgroups below parent that are of no known slot. A runtime
// that is killed between making a cgroup and writing its own state leaves one that
// nothing else knows of.
func removeStrayCgroups(parent string, known map[string]bool) error {
	if parent == "" || parent == "/" {
		return nil
	}
	dirs, err := cgroupDirs(parent)
	if err != nil {
		return err
	}
	var errs []error
	for _, dir := range dirs {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
		for _, e := range entries {
			if e.IsDir() && !known[e.Name()] {
				errs = append(errs, removeCgroupDir(filepath.Join(dir, e.Name())))
			}
		}
	}
	return errors.Join(errs...)
}

// removeCgroupDir succeeds when there is none.
func removeCgroupDir(dir string) error {
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove cgroup: %w", err)
	}
	return nil
}

func hasChildren(dir string) bool {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return false
	}
	for _, e := range entries {
		if e.IsDir() {
			return true
		}
	}
	return false
}
