package runc

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"

	"github.com/cubesandbox/cubelet/internal/vmm"
)

const (
	// codeKilled is reported for a process that ended with nobody looking.
	codeKilled = 137
	// codeShimDied is reported for a process that went with its shim.
	codeShimDied = 255
)

// Wait blocks until the owner's process is gone, and reports how it ended. Code
// NotFound when the owner has no slot.
func (s *Slots) Wait(ctx context.Context, owner string) (vmm.Exit, error) {
	sl, err := s.lookup(owner)
	if err != nil {
		return vmm.Exit{}, err
	}
	exit, err := s.taskExit(ctx, sl)
	if err == nil {
		err = waitGone(ctx, sl.process)
	}
	if err != nil {
		return vmm.Exit{}, fmt.Errorf("wait for VMM of %s: %w", owner, err)
	}
	exit.Owner = owner
	if exit.Time.IsZero() {
		exit.Time = time.Now()
	}
	return exit, nil
}

// taskExit asks containerd. Its answer breaks off when the shim dies, and when an
// external containerd restarts: only the process itself tells these apart.
func (s *Slots) taskExit(ctx context.Context, sl *slot) (vmm.Exit, error) {
	for {
		status, err := s.taskStatus(ctx, sl)
		switch {
		case errdefs.IsNotFound(err):
			if exit, ok := s.exits[sl.name]; ok {
				return exit, nil
			}
			return vmm.Exit{Code: codeKilled}, nil
		case err == nil:
			return vmm.Exit{Code: int(status.ExitCode()), Time: status.ExitTime()}, nil
		case ctx.Err() != nil:
			return vmm.Exit{}, ctx.Err()
		case !alive(sl.process):
			return vmm.Exit{Code: codeShimDied}, nil
		}
		select {
		case <-time.After(retryPause):
		case <-ctx.Done():
			return vmm.Exit{}, ctx.Err()
		}
	}
}

func (s *Slots) taskStatus(ctx context.Context, sl *slot) (client.ExitStatus, error) {
	c, err := s.cfg.Client.LoadContainer(ctx, sl.name)
	if err != nil {
		return client.ExitStatus{}, err
	}
	task, err := c.Task(ctx, nil)
	if err != nil {
		return client.ExitStatus{}, err
	}
	exited, err := task.Wait(ctx)
	if err != nil {
		return client.ExitStatus{}, err
	}
	select {
	case status := <-exited:
		return status, errgrpc.ToNative(status.Error())
	case <-ctx.Done():
		return client.ExitStatus{}, ctx.Err()
	}
}
