package template

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/guestapi"
)

const (
	readyInterval = 200 * time.Millisecond
	outputBytes   = 4 << 10 // of a command's output that an error shows
)

// guestSession brings a booted guest to where its sandboxes begin.
type guestSession struct {
	m    *Manager
	b    memoryBuild
	dial guestapi.Dialer
}

func (g guestSession) prepare(ctx context.Context) error {
	boot, cancel := context.WithTimeout(ctx, g.m.cfg.BootTimeout)
	defer cancel()
	if err := g.m.cfg.Guest.Init(boot, g.dial, g.m.identity(g.b)); err != nil {
		if ctx.Err() == nil && boot.Err() != nil {
			return cube.Errorf(cube.CodeDeadlineExceeded, "the guest's agent did not answer within %s: %w", g.m.cfg.BootTimeout, err)
		}
		return err
	}
	if err := g.start(ctx); err != nil {
		return err
	}
	g.sync(ctx)
	return nil
}

// start runs the start command and waits until it is ready.
func (g guestSession) start(ctx context.Context) error {
	t := g.b.manifest.Template
	if t.StartCommand == "" && t.Ready.Command == "" && t.Ready.Port == 0 {
		return nil
	}
	g.b.feed.stage(stageStart, t.StartCommand)
	ctx, cancel := context.WithTimeoutCause(ctx, t.Ready.Timeout, errNotReady)
	defer cancel()
	c := &command{ended: make(chan struct{})}
	if t.StartCommand != "" {
		session, err := g.m.cfg.Guest.Exec(ctx, g.dial, "", shell(t.StartCommand))
		if err != nil {
			return fmt.Errorf("start command: %w", err)
		}
		read := make(chan struct{})
		defer func() {
			// The program lives on in the memory image.
			_ = session.Close()
			cancel()
			<-read
		}()
		go func() {
			defer close(read)
			c.follow(session)
		}()
	}
	return g.awaitReady(ctx, c, t.Ready)
}

var errNotReady = errors.New("not ready in time")

func shell(script string) cube.ExecSpec {
	return cube.ExecSpec{Args: []string{"/bin/sh", "-c", script}}
}

// awaitReady polls until the guest is ready, the start command fails or time is up.
func (g guestSession) awaitReady(ctx context.Context, c *command, ready cube.ReadySpec) error {
	ended := c.ended
	for {
		why := g.probe(ctx, ready)
		if why == nil {
			return c.failure(false)
		}
		select {
		case <-ended:
			if err := c.failure(true); err != nil {
				return err
			}
			ended = nil // it did its work and ended well; what it started may become ready
		case <-time.After(readyInterval):
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			if !errors.Is(context.Cause(ctx), errNotReady) {
				return context.Cause(ctx)
			}
			return cube.Errorf(cube.CodeDeadlineExceeded, "the start command was not ready after %s: %w%s", ready.Timeout, why, c.text())
		}
	}
}

// probe tells why the guest is not ready, nil when it is.
func (g guestSession) probe(ctx context.Context, ready cube.ReadySpec) error {
	switch {
	case ready.Port != 0:
		conn, err := g.dial(ctx, ready.Port)
		if err != nil {
			return fmt.Errorf("port %d: %w", ready.Port, err)
		}
		return conn.Close()
	case ready.Command != "":
		stdout, stderr, code, err := g.m.cfg.Guest.Run(ctx, g.dial, "", shell(ready.Command))
		if err != nil {
			return fmt.Errorf("ready command: %w", err)
		}
		if code != 0 {
			return fmt.Errorf("ready command: exit code %d%s", code, quoteOutput(append(stdout, stderr...)))
		}
	}
	return nil
}

// sync has the guest write its disks, so that its clones need not. An image may have no
// program for it; then the clones do it.
func (g guestSession) sync(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()
	_, _, code, err := g.m.cfg.Guest.Run(ctx, g.dial, "", cube.ExecSpec{Args: []string{"sync"}, User: "root", Cwd: "/"})
	if err != nil || code != 0 {
		g.m.cfg.Log.Debug("the guest did not sync", "template", g.b.manifest.Template.ID, "code", code, "err", err)
	}
}

// command is the start command as far as it was seen.
type command struct {
	ended  chan struct{} // closed when it ended; then exit is set
	exit   *cube.ExecExit
	output output
}

func (c *command) follow(s cube.ExecSession) {
	for {
		ev, err := s.Recv()
		if err != nil {
			return
		}
		if ev.Exit != nil {
			c.exit = ev.Exit
			close(c.ended)
			return
		}
		c.output.write(ev.Data)
	}
}

// failure tells how the command failed, nil when it runs or ended well.
func (c *command) failure(ended bool) error {
	if !ended {
		select {
		case <-c.ended:
		default:
			return nil
		}
	}
	if c.exit.Code == 0 && c.exit.Error == "" {
		return nil
	}
	return cube.Errorf(cube.CodeFailedPrecondition, "the start command failed: %s%s", strings.TrimSpace(c.exit.Status+" "+c.exit.Error), c.text())
}

func (c *command) text() string { return quoteOutput(c.output.tail()) }
