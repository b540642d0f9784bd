package storage

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cubesandbox/cubelet/internal/durable"
)

// Known is what should be on the pool.
type Known struct {
	Owners    []string // sandboxes that may have a directory
	Templates []string // templates that may have a directory
	Snapshots []string // snapshots that may have a directory
	// ScratchInUse tells that something is being built, so that scratch files are right.
	ScratchInUse bool
}

// Finding is one thing on the pool that does not fit.
type Finding struct {
	Path    string
	Problem string // one sentence
}

// Check lists what is on the pool and should not be, sorted by path. It changes nothing.
func (p *Pool) Check(ctx context.Context, known Known) ([]Finding, error) {
	c := &checker{ctx: ctx}
	c.each(p.dir, func(e os.DirEntry, path string) {
		switch e.Name() {
		case templatesName, sandboxesName, snapshotsName, scratchName, lockName:
		default:
			c.found(path, "is not part of a pool")
		}
	})
	c.owned(p.SandboxesDir(), known.Owners, "belongs to no sandbox")
	c.owned(p.TemplatesDir(), known.Templates, "belongs to no template")
	c.owned(p.SnapshotsDir(), known.Snapshots, "belongs to no snapshot")
	if !known.ScratchInUse {
		c.each(p.ScratchDir(), func(_ os.DirEntry, path string) { c.found(path, "was left in scratch") })
	}
	if c.err != nil {
		return nil, fmt.Errorf("check pool: %w", c.err)
	}
	slices.SortFunc(c.findings, func(a, b Finding) int { return strings.Compare(a.Path, b.Path) })
	return c.findings, nil
}

type checker struct {
	ctx      context.Context
	findings []Finding
	err      error // the first one
}

func (c *checker) found(path, problem string) {
	c.findings = append(c.findings, Finding{Path: path, Problem: problem})
}

// each calls fn for the entries of a directory. An entry that vanished meanwhile is fine.
func (c *checker) each(dir string, fn func(e os.DirEntry, path string)) {
	if c.err == nil {
		c.err = c.ctx.Err()
	}
	if c.err != nil {
		return
	}
	entries, err := os.ReadDir(dir)
	if err != nil && !os.IsNotExist(err) {
		c.err = err
		return
	}
	for _, e := range entries {
		fn(e, filepath.Join(dir, e.Name()))
	}
}

// owned checks a directory that holds one directory per known name.
func (c *checker) owned(dir string, known []string, problem string) {
	c.each(dir, func(e os.DirEntry, path string) {
		if !e.IsDir() || !slices.Contains(known, e.Name()) {
			c.found(path, problem)
			return
		}
		c.tree(path)
	})
}

// tree looks for what no part of Cubelet makes or leaves in a directory.
func (c *checker) tree(dir string) {
	if mounted, err := isMountRoot(dir); err == nil && mounted {
		c.found(dir, "is a mount point")
		return
	}
	c.each(dir, func(e os.DirEntry, path string) {
		switch {
		case e.IsDir():
			c.tree(path)
		case !e.Type().IsRegular():
			c.found(path, "is no regular file")
		case durable.IsTemp(e.Name()):
			c.found(path, "is a file that was not written to its end")
		}
	})
}
