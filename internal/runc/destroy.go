package runc

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"golang.org/x/sys/unix"
)

// retryPause is how long a call that met a dying shim waits before the next try.
const retryPause = 20 * time.Millisecond

// Destroy kills what runs in the owner's slot and returns when it is reaped and the
// slot is gone, however long a large guest takes: only ctx bounds it. It waits for a
// Claim of that owner that still runs. Succeeds when there is no slot.
func (s *Slots) Destroy(ctx context.Context, owner string) error {
	for {
		s.mu.Lock()
		sl, claim := s.owners[owner], s.claims[owner]
		s.mu.Unlock()
		switch {
		case claim != nil:
			select {
			case <-claim:
			case <-ctx.Done():
				return fmt.Errorf("destroy VMM slot of %s: %w", owner, ctx.Err())
			}
		case sl == nil:
			return nil
		default:
			if err := s.destroy(ctx, sl); err != nil {
				return fmt.Errorf("destroy VMM slot of %s: %w", owner, err)
			}
			return nil
		}
	}
}

// destroy removes a slot in whatever state it is, and its owner's name and user ID
// with it. It may be repeated, and run for one slot by several callers.
func (s *Slots) destroy(ctx context.Context, sl *slot) error {
	select {
	case <-sl.busy:
		defer func() { sl.busy <- struct{}{} }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if sl.gone {
		return nil
	}
	if err := killProcess(sl.process); err != nil {
		return err
	}
	if err := s.removeContainer(ctx, sl); err != nil {
		return err
	}
	// containerd gives a dead shim's container up after five seconds, dead or not.
	if err := waitGone(ctx, sl.process); err != nil {
		return err
	}
	if err := s.removeRuncState(ctx, sl); err != nil {
		return err
	}
	if err := os.RemoveAll(sl.dir); err != nil {
		return fmt.Errorf("remove directory of %s: %w", sl.name, err)
	}
	sl.gone = true
	s.uids.free(sl.uid)
	s.mu.Lock()
	if s.owners[sl.owner] == sl {
		delete(s.owners, sl.owner)
	}
	s.mu.Unlock()
	return nil
}

func (s *Slots) removeContainer(ctx context.Context, sl *slot) error {
	c, err := s.cfg.Client.LoadContainer(ctx, sl.name)
	if errdefs.IsNotFound(err) {
		return s.leaveGroup(ctx, sl)
	}
	if err != nil {
		return fmt.Errorf("load container of %s: %w", sl.name, err)
	}
	if err := s.removeTask(ctx, sl, c); err != nil {
		return err
	}
	if err := s.leaveGroup(ctx, sl); err != nil {
		return err
	}
	if err := c.Delete(ctx); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("delete container record of %s: %w", sl.name, err)
	}
	return nil
}

// removeTask repeats until there is no task: while a shim dies, calls for its tasks
// fail in several ways, and then containerd takes the tasks away itself.
func (s *Slots) removeTask(ctx context.Context, sl *slot, c client.Container) error {
	for {
		task, err := c.Task(ctx, nil)
		if errdefs.IsNotFound(err) {
			return nil
		}
		if err == nil {
			err = s.deleteTask(ctx, sl, task)
		}
		if err == nil {
			continue
		}
		select {
		case <-time.After(retryPause):
		case <-ctx.Done():
			return fmt.Errorf("delete task of %s: %w", sl.name, errors.Join(ctx.Err(), err))
		}
	}
}

func (s *Slots) deleteTask(ctx context.Context, sl *slot, task client.Task) error {
	exited, err := task.Wait(ctx)
	if err != nil {
		return err
	}
	if err := task.Kill(ctx, unix.SIGKILL); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	select {
	case status := <-exited:
		if status.Error() != nil {
			return errgrpc.ToNative(status.Error())
		}
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := s.leaveGroup(ctx, sl); err != nil {
		return err
	}
	_, err = task.Delete(ctx)
	return err
}

func (s *Slots) leaveGroup(ctx context.Context, sl *slot) error {
	if sl.left {
		return nil
	}
	if err := s.groups.leave(ctx, sl.group); err != nil {
		return err
	}
	sl.left = true
	return nil
}

// removeRuncState deletes what is left of a container that containerd gave up: its
// state and its cgroups, which nobody else would ever remove.
func (s *Slots) removeRuncState(ctx context.Context, sl *slot) error {
	root := filepath.Join(s.cfg.RuncRoot, s.cfg.Client.DefaultNamespace())
	if _, err := os.Lstat(filepath.Join(root, sl.name)); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	out, err := exec.CommandContext(ctx, s.cfg.RuncBinary, "--root", root, "delete", "--force", sl.name).CombinedOutput()
	if err != nil {
		return fmt.Errorf("runc delete %s: %w: %.200s", sl.name, err, out)
	}
	return nil
}
