package storage

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	cube "github.com/cubesandbox/cubelet"
)

// Probe writes a small file, syncs it, clones it, reads both back and removes them.
// A disk may hang for ever: Probe returns when ctx ends, and says Unavailable while an
// earlier probe still hangs.
func (p *Pool) Probe(ctx context.Context) error {
	if !p.probing.TryLock() {
		return cube.Errorf(cube.CodeUnavailable, "an earlier probe of the pool does not end")
	}
	done := make(chan error, 1)
	go func() {
		err := p.probe(ctx)
		p.probing.Unlock() // before the answer: the next probe may follow at once
		done <- err
	}()
	var err error
	select {
	case err = <-done:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		return fmt.Errorf("probe pool: %w", err)
	}
	return nil
}

func (p *Pool) probe(ctx context.Context) (err error) {
	dir, err := os.MkdirTemp(p.ScratchDir(), "probe-")
	if err != nil {
		return err
	}
	defer func() {
		cleanup := p.removeTree(context.WithoutCancel(ctx), scratchName, filepath.Base(dir))
		err = errors.Join(err, cleanup)
	}()
	want := make([]byte, os.Getpagesize())
	rand.Read(want) // never fails
	src, dst := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	if err := writeSynced(src, want); err != nil {
		return err
	}
	if err := p.Clone(ctx, src, dst); err != nil {
		return err
	}
	for _, path := range []string{src, dst} {
		got, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if !bytes.Equal(got, want) {
			return fmt.Errorf("%s reads back other bytes than were written", path)
		}
	}
	return nil
}

func writeSynced(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}
