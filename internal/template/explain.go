package template

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"syscall"

	cube "github.com/cubesandbox/cubelet"
)

const (
	consoleLines = 20
	consoleBytes = 8 << 10
)

// explain adds the end of the guest's console to an error, and tells a pool that ran full
// from what it did to the machine.
func (m *Manager) explain(err error, console string) error {
	code := cube.CodeOf(err)
	var st syscall.Statfs_t
	if syscall.Statfs(m.cfg.Dir, &st) == nil && int64(st.Bavail)*st.Bsize < spareBytes/4 && code == cube.CodeInternal {
		code = cube.CodeNoSpace
		err = fmt.Errorf("the pool is full: %w", err)
	}
	lines := consoleTail(console)
	if lines == "" || code == cube.CodeCanceled {
		return &cube.Error{Code: code, Hint: hintOf(err), Err: err}
	}
	return &cube.Error{Code: code, Hint: hintOf(err), Err: fmt.Errorf("%w\nthe guest's console ended with:\n%s", err, lines)}
}

// withUndo adds what went wrong while an error was cleaned up after. The code stays that
// of the cause.
func withUndo(cause error, undo ...error) error {
	undoErr := errors.Join(undo...)
	switch {
	case undoErr == nil:
		return cause
	case cause == nil:
		return undoErr
	}
	return &cube.Error{Code: cube.CodeOf(cause), Hint: hintOf(cause), Err: fmt.Errorf("%w; undo: %w", cause, undoErr)}
}

func hintOf(err error) string {
	var e *cube.Error
	if errors.As(err, &e) {
		return e.Hint
	}
	return ""
}

// consoleTail returns the last lines of a console log, fit for a terminal.
func consoleTail(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return ""
	}
	b, err := io.ReadAll(io.NewSectionReader(f, max(0, info.Size()-consoleBytes), consoleBytes))
	if err != nil {
		return ""
	}
	return lastLines(string(b), consoleLines)
}

// lastLines returns the last n lines with every control character replaced.
func lastLines(s string, n int) string {
	s = strings.ToValidUTF8(strings.ReplaceAll(s, "\r", ""), "?")
	lines := strings.Split(strings.Trim(s, "\n"), "\n")
	lines = lines[max(0, len(lines)-n):]
	return strings.Map(func(r rune) rune {
		if r != '\n' && r != '\t' && (r < ' ' || r >= 0x7f && r < 0xa0) {
			return '?'
		}
		return r
	}, strings.Join(lines, "\n"))
}

// quoteOutput renders a command's output for an error.
func quoteOutput(b []byte) string {
	if len(b) > outputBytes {
		b = b[len(b)-outputBytes:]
	}
	text := lastLines(string(b), consoleLines)
	if strings.TrimSpace(text) == "" {
		return ""
	}
	return "; its output ended with:\n" + text
}

// output keeps the end of what a command wrote.
type output struct {
	mu sync.Mutex
	b  []byte
}

func (o *output) write(b []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.b = append(o.b, b...)
	if len(o.b) > 2*outputBytes {
		o.b = append([]byte(nil), o.b[len(o.b)-outputBytes:]...)
	}
}

func (o *output) tail() []byte {
	o.mu.Lock()
	defer o.mu.Unlock()
	return append([]byte(nil), o.b...)
}
