package server

import (
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	cube "github.com/cubesandbox/cubelet"
	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

// The bounds of a request's shape. They keep one request from filling the journal or a
// guest's command line; what a node can run is decided elsewhere.
const (
	maxPageSize        = 1000
	maxTokenBytes      = 1 << 10
	maxRefBytes        = 256
	maxImageBytes      = 1 << 10
	maxPathBytes       = 4096
	maxCommandBytes    = 64 << 10
	maxKeyBytes        = 128
	maxEnvEntries      = 1024
	maxEnvBytes        = 256 << 10
	maxMetadataEntries = 256
	maxMetadataBytes   = 64 << 10
	maxHostMounts      = 64
	maxArgs            = 16 << 10
	maxArgBytes        = 1 << 20
	maxTerminal        = 65535
	maxDuration        = 10 * 365 * 24 * time.Hour
)

// check collects the first fault of a request. Its methods do nothing after one.
type check struct{ err error }

func (c *check) add(err error) {
	if c.err == nil {
		c.err = err
	}
}

func (c *check) fail(field, format string, args ...any) {
	c.add(cube.InvalidField(field, format, args...))
}

// text checks an optional string.
func (c *check) text(field, s string, limit int) {
	switch {
	case len(s) > limit:
		c.fail(field, "%d bytes; at most %d are allowed", len(s), limit)
	case strings.ContainsRune(s, 0):
		c.fail(field, "contains a NUL character")
	}
}

// ref checks a required reference to an object.
func (c *check) ref(field, s string) {
	if s == "" {
		c.fail(field, "is required")
	}
	c.text(field, s, maxRefBytes)
}

func (c *check) key(s string) { c.text("idempotency_key", s, maxKeyBytes) }

// env checks environment variables.
func (c *check) env(field string, m map[string]string) {
	total := 0
	for k, v := range m {
		total += len(k) + len(v) + 2
		switch {
		case k == "":
			c.fail(field, "a variable has no name")
		case strings.ContainsAny(k, "=\x00"):
			c.fail(field, "%q is no name of a variable", k)
		case strings.ContainsRune(v, 0):
			c.fail(entry(field, k), "contains a NUL character")
		}
	}
	c.size(field, len(m), maxEnvEntries)
	c.bytes(field, total, maxEnvBytes)
}

// metadata checks the metadata of a request or filter.
func (c *check) metadata(m map[string]string) {
	total := 0
	for k, v := range m {
		total += len(k) + len(v)
		if k == "" {
			c.fail("metadata", "a key is empty")
		}
	}
	c.size("metadata", len(m), maxMetadataEntries)
	c.bytes("metadata", total, maxMetadataBytes)
}

// args checks a program and its arguments; none means the image's own.
func (c *check) args(field string, args []string) {
	total := 0
	for i, a := range args {
		total += len(a) + 1
		if strings.ContainsRune(a, 0) {
			c.fail(index(field, i), "contains a NUL character")
		}
	}
	if len(args) > 0 && args[0] == "" {
		c.fail(index(field, 0), "the program's name is empty")
	}
	c.size(field, len(args), maxArgs)
	c.bytes(field, total, maxArgBytes)
}

func (c *check) size(field string, n, limit int) {
	if n > limit {
		c.fail(field, "%d entries; at most %d are allowed", n, limit)
	}
}

func (c *check) bytes(field string, n, limit int) {
	if n > limit {
		c.fail(field, "%d bytes in all; at most %d are allowed", n, limit)
	}
}

// duration converts an optional duration; absent is zero.
func (c *check) duration(field string, d *durationpb.Duration) time.Duration {
	if d == nil {
		return 0
	}
	v := d.AsDuration()
	switch {
	case d.CheckValid() != nil:
		c.fail(field, "is no valid duration")
	case v < 0:
		c.fail(field, "%s is negative", v)
	case v > maxDuration:
		c.fail(field, "%s; at most %s is allowed", v, maxDuration)
	}
	return v
}

func (c *check) windowSize(field string, ws *cubev1.WindowSize) cube.WindowSize {
	for _, f := range [...]struct {
		name string
		n    uint32
	}{{"cols", ws.GetCols()}, {"rows", ws.GetRows()}} {
		if f.n == 0 || f.n > maxTerminal {
			c.fail(field+"."+f.name, "%d is not between 1 and %d", f.n, maxTerminal)
		}
	}
	return cube.WindowSize{Cols: ws.GetCols(), Rows: ws.GetRows()}
}

func index(field string, i int) string { return fmt.Sprintf("%s[%d]", field, i) }

func entry(field, key string) string { return fmt.Sprintf("%s[%q]", field, key) }
