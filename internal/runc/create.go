package runc

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/typeurl/v2"

	cube "github.com/cubesandbox/cubelet"
)

const (
	uidLabel    = "cubelet/uid"
	parentLabel = "cubelet/cgroup-parent"

	createTimeout   = time.Minute
	launcherTimeout = 20 * time.Second
	launcherPoll    = 500 * time.Microsecond
)

// create builds a slot whose launcher waits. What it leaves behind when it fails is
// removed before it returns. The end of ctx is obeyed before and after, not within:
// when a client leaves in the middle of a task's creation, containerd may still finish
// it, and nobody would ever look for that task.
func (s *Slots) create(ctx context.Context) (*slot, error) {
	select {
	case s.making <- struct{}{}:
		defer func() { <-s.making }()
	case <-ctx.Done():
		return nil, fmt.Errorf("make VMM slot: %w", ctx.Err())
	}
	whole, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer cancel()
	sl, err := s.createIn(whole, false)
	if err != nil && ctx.Err() == nil && cube.CodeOf(err) == cube.CodeInternal {
		// The shim that the slot was to join may have died at this moment.
		s.cfg.Log.Warn("make VMM slot again with another shim", "error", err)
		sl, err = s.createIn(whole, true)
	}
	if err == nil && ctx.Err() != nil {
		err = errors.Join(ctx.Err(), s.destroy(whole, sl))
	}
	if err != nil {
		return nil, fmt.Errorf("make VMM slot: %w", err)
	}
	return sl, nil
}

func (s *Slots) createIn(ctx context.Context, freshGroup bool) (*slot, error) {
	uid, err := s.uids.take()
	if err != nil {
		return nil, err
	}
	sl := newSlot(s.cfg.RunDir, "vmm-"+strings.ToLower(rand.Text()[:13]), uid)
	sl.group = s.groups.join(freshGroup)
	err = s.build(ctx, sl)
	if err != nil {
		// Only a member leaves a group; this one never became one.
		s.groups.joined(sl.group, false)
		sl.group = nil
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		return nil, errors.Join(err, s.destroy(undo, sl))
	}
	s.groups.joined(sl.group, true)
	return sl, nil
}

func (s *Slots) build(ctx context.Context, sl *slot) error {
	if err := makeSlotDirs(sl); err != nil {
		return err
	}
	c, err := s.createContainer(ctx, sl)
	if err != nil {
		return err
	}
	task, err := c.NewTask(ctx, cio.NullIO)
	if err != nil {
		return fmt.Errorf("create container of %s: %w", sl.name, err)
	}
	if sl.process, err = identify(int(task.Pid())); err != nil {
		return fmt.Errorf("first process of %s: %w", sl.name, err)
	}
	if err := task.Start(ctx); err != nil {
		return fmt.Errorf("start launcher of %s: %w", sl.name, err)
	}
	return s.awaitLauncher(ctx, sl)
}

func makeSlotDirs(sl *slot) error {
	if err := os.MkdirAll(sl.shared(), 0o700); err != nil {
		return fmt.Errorf("create directory of %s: %w", sl.name, err)
	}
	if err := os.Chown(sl.shared(), sl.uid, sl.uid); err != nil {
		return fmt.Errorf("create directory of %s: %w", sl.name, err)
	}
	return nil
}

// createContainer goes past client.NewContainer, which takes a lease (two more synced
// transactions) for images and snapshots that slots do not have.
func (s *Slots) createContainer(ctx context.Context, sl *slot) (client.Container, error) {
	spec, err := typeurl.MarshalAnyToProto(s.jail.spec(sl, sl.group.id))
	if err != nil {
		return nil, fmt.Errorf("encode spec of %s: %w", sl.name, err)
	}
	opts, err := typeurl.MarshalAnyToProto(&options.Options{BinaryName: s.cfg.RuncBinary, Root: s.cfg.RuncRoot})
	if err != nil {
		return nil, fmt.Errorf("encode options of %s: %w", sl.name, err)
	}
	_, err = s.cfg.Client.ContainerService().Create(ctx, containers.Container{
		ID:      sl.name,
		Labels:  map[string]string{uidLabel: strconv.Itoa(sl.uid), parentLabel: s.cfg.CgroupParent},
		Runtime: containers.RuntimeInfo{Name: s.cfg.Client.Runtime(), Options: opts},
		Spec:    spec,
	})
	if err != nil {
		return nil, fmt.Errorf("create container record of %s: %w", sl.name, err)
	}
	c, err := s.cfg.Client.LoadContainer(ctx, sl.name)
	if err != nil {
		return nil, fmt.Errorf("load container record of %s: %w", sl.name, err)
	}
	return c, nil
}

// awaitLauncher returns when the launcher listens: its socket then has its name.
func (s *Slots) awaitLauncher(ctx context.Context, sl *slot) error {
	ctx, cancel := context.WithTimeout(ctx, launcherTimeout)
	defer cancel()
	tick := time.NewTicker(launcherPoll)
	defer tick.Stop()
	for {
		if _, err := os.Lstat(sl.socket()); err == nil {
			return nil
		}
		if !alive(sl.process) {
			return fmt.Errorf("launcher of %s ended before it listened; is %s static?", sl.name, filepath.Base(s.cfg.Launcher))
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("launcher of %s does not listen: %w", sl.name, ctx.Err())
		}
	}
}
