package cli

import (
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/term"
)

// redrawAfter is how often a progress bar changes at most.
const redrawAfter = 100 * time.Millisecond

// progress shows how far something is: as a bar on a terminal, elsewhere as one line
// each time that the step changes.
type progress struct {
	w     io.Writer
	width int // of the terminal; 0 when there is none
	step  string
	drawn time.Time
	open  string // the line under the cursor, empty when the cursor is on a new one
}

// newProgress shows progress on standard error, unless -q asks for silence.
func (a *app) newProgress() *progress {
	p := &progress{w: a.stderr}
	switch {
	case a.quiet:
		p.w = io.Discard
	case isTerminal(a.stderr):
		p.width = 80
		if w, _, err := term.GetSize(int(a.stderr.Fd())); err == nil && w > 0 {
			p.width = w
		}
	}
	return p
}

// update shows text. A new step begins a new line. Bytes are shown when they are known.
func (p *progress) update(text, step string, done, total int64) {
	fresh := step != p.step
	p.step = step
	if p.width == 0 {
		if fresh {
			fmt.Fprintln(p.w, strings.TrimRight(text+amount(done, total), " "))
		}
		return
	}
	last := total > 0 && done == total
	if !fresh && !last && time.Since(p.drawn) < redrawAfter {
		return
	}
	if fresh {
		p.close()
	}
	p.drawn = time.Now()
	p.open = p.fit(text, bar(done, total)+amount(done, total))
	fmt.Fprint(p.w, "\r\x1b[K"+p.open)
}

// close ends the line under the cursor.
func (p *progress) close() {
	if p.open != "" {
		fmt.Fprintln(p.w)
		p.open = ""
	}
}

// fit shortens text so that the whole stays on one line.
func (p *progress) fit(text, tail string) string {
	room := p.width - 1 - utf8.RuneCountInString(tail)
	if r := []rune(text); len(r) > room && room > 1 {
		text = string(r[:room-1]) + "…"
	}
	return text + tail
}

func amount(done, total int64) string {
	switch {
	case total > 0:
		return fmt.Sprintf("  %s / %s", bytesName(done), bytesName(total))
	case done > 0:
		return "  " + bytesName(done)
	}
	return ""
}

func bar(done, total int64) string {
	const cells = 20
	if total <= 0 {
		return ""
	}
	full := int(min(max(done, 0), total) * cells / total)
	return fmt.Sprintf("  [%s%s] %3d%%", strings.Repeat("=", full), strings.Repeat(" ", cells-full), min(max(done, 0), total)*100/total)
}
