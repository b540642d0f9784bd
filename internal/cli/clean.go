package cli

import (
	"io"
	"strings"
	"unicode"
	"unicode/utf8"
)

// clean replaces what could move a cursor or change a terminal. New lines and tabs stay.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || !unicode.IsControl(r) && r != utf8.RuneError {
			return r
		}
		return '\uFFFD'
	}, s)
}

// line is clean for a cell of a table: it has no line breaks either.
func line(s string) string {
	return strings.Join(strings.Fields(clean(s)), " ")
}

// cleanWriter cleans a stream. A character that is cut in two by a write is kept back
// until its rest arrives.
type cleanWriter struct {
	w    io.Writer
	rest []byte
}

// Write implements io.Writer.
func (c *cleanWriter) Write(p []byte) (int, error) {
	b := append(c.rest, p...)
	n := len(b)
	for i := 1; i < utf8.UTFMax && i <= n; i++ {
		if utf8.RuneStart(b[n-i]) {
			if !utf8.FullRune(b[n-i:]) {
				n -= i
			}
			break
		}
	}
	text := strings.ReplaceAll(string(b[:n]), "\r\n", "\n")
	c.rest = append([]byte(nil), b[n:]...)
	if _, err := io.WriteString(c.w, clean(text)); err != nil {
		return 0, err
	}
	return len(p), nil
}
