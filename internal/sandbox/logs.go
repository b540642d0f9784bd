package sandbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"

	cube "github.com/cubesandbox/cubelet"
)

const (
	// followPeriod is how often a followed console log is looked at.
	followPeriod = 200 * time.Millisecond
	// tailBytes bounds how much of a log is read to find its last lines.
	tailBytes = 4 << 20
	// reasonLines is how much of the console a failure's reason carries.
	reasonLines = 5
)

// Logs implements cube.Sandboxes.
func (m *Manager) Logs(ctx context.Context, ref string, o cube.LogOptions, w io.Writer) error {
	d, err := m.find(ref)
	if err != nil {
		return err
	}
	if o.TailLines < 0 {
		return cube.InvalidField("tail_lines", "must not be negative")
	}
	f, err := os.Open(d.record().Plan.Machine.ConsolePath)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil // nothing was written yet
	case err != nil:
		return fmt.Errorf("open console log: %w", err)
	}
	defer f.Close()
	if o.TailLines > 0 {
		if err := seekTail(f, o.TailLines); err != nil {
			return fmt.Errorf("read console log: %w", err)
		}
	}
	if _, err := io.Copy(w, f); err != nil || !o.Follow {
		return err
	}
	return d.follow(ctx, f, w)
}

// follow copies what is appended until ctx ends or the sandbox is gone.
func (d *driver) follow(ctx context.Context, f io.Reader, w io.Writer) error {
	tick := time.NewTicker(followPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-d.gone:
			return nil
		case <-tick.C:
			if _, err := io.Copy(w, f); err != nil {
				return err
			}
		}
	}
}

// seekTail moves to the beginning of the last n lines.
func seekTail(f *os.File, n int) error {
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	from := max(0, end-tailBytes)
	b := make([]byte, end-from)
	if _, err := f.ReadAt(b, from); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	_, err = f.Seek(from+int64(tailStart(b, n)), io.SeekStart)
	return err
}

// tailStart returns where the last n lines of b begin.
func tailStart(b []byte, n int) int {
	at := len(bytes.TrimSuffix(b, []byte("\n")))
	for range n {
		i := bytes.LastIndexByte(b[:at], '\n')
		if i < 0 {
			return 0
		}
		at = i
	}
	return at + 1
}

// consoleTail returns the last lines of the console for a failure's reason.
func (d *driver) consoleTail() string {
	f, err := os.Open(d.record().Plan.Machine.ConsolePath)
	if err != nil {
		return ""
	}
	defer f.Close()
	if err := seekTail(f, reasonLines); err != nil {
		return ""
	}
	b, err := io.ReadAll(io.LimitReader(f, 4<<10))
	if err != nil || len(bytes.TrimSpace(b)) == 0 {
		return ""
	}
	return "; its console ended with: " + strings.ToValidUTF8(strings.TrimSpace(string(b)), "?")
}
