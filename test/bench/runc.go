package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"
)

// compareRunc measures `runc run` of echo in the same root file system: a container
// that shares the host's kernel, the floor for anything that starts a program apart.
func compareRunc(ctx context.Context, runc, rootfs string, n int) (series, error) {
	const name = "runc run of the same root file system"
	dir, err := os.MkdirTemp("", "cube-bench-")
	if err != nil {
		return series{}, err
	}
	defer os.RemoveAll(dir)
	root := filepath.Join(dir, "rootfs")
	if err := os.Mkdir(root, 0o755); err != nil {
		return series{}, err
	}
	if out, err := exec.CommandContext(ctx, "tar", "-xf", rootfs, "-C", root).CombinedOutput(); err != nil {
		return series{}, fmt.Errorf("unpack %s: %w: %s", rootfs, err, out)
	}
	if out, err := exec.CommandContext(ctx, runc, "spec", "--bundle", dir).CombinedOutput(); err != nil {
		return series{}, fmt.Errorf("runc spec: %w: %s", err, out)
	}
	if err := editSpec(filepath.Join(dir, "config.json")); err != nil {
		return series{}, err
	}
	s := newSamples()
	for i := range n {
		begin := time.Now()
		out, err := exec.CommandContext(ctx, runc, "--root", filepath.Join(dir, "state"), "run", "--bundle", dir, fmt.Sprintf("bench-%d-%d", os.Getpid(), i)).CombinedOutput()
		if err != nil || string(out) != "hello\n" {
			s.fail(name, fmt.Errorf("%w: %s", err, out))
			continue
		}
		s.add(name, time.Since(begin))
	}
	return s.series(name, ""), nil
}

// editSpec makes the default configuration run echo without a terminal.
func editSpec(path string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var spec map[string]any
	if err := json.Unmarshal(b, &spec); err != nil {
		return err
	}
	process, ok := spec["process"].(map[string]any)
	if !ok {
		return fmt.Errorf("%s has no process", path)
	}
	process["terminal"] = false
	process["args"] = []string{"/bin/echo", "hello"}
	delete(process, "rlimits") // the host may not allow the default's
	if b, err = json.Marshal(spec); err != nil {
		return err
	}
	return os.WriteFile(path, b, 0o644)
}
