// Package doctor checks what a node needs of its host and explains each finding.
//
// A check looks at the real thing: it runs the tool, makes the namespace, boots the
// guest. It changes nothing that outlives it.
package doctor

import (
	"context"
	"fmt"
	"io"
)

// Level is the outcome of a check.
type Level string

// The levels. Only Fail makes a node unusable.
const (
	OK   Level = "ok"
	Warn Level = "warn"
	Fail Level = "fail"
)

// Result is what one check found.
type Result struct {
	Name   string `json:"name"`
	Level  Level  `json:"level"`
	Detail string `json:"detail"`        // what was seen
	Fix    string `json:"fix,omitempty"` // what to do, for warn and fail
}

// Check is one requirement.
type Check struct {
	Name string
	Why  string // what the node needs it for
	Run  func(ctx context.Context) Result
}

// Run makes the checks in order and reports each result as it comes. It returns true
// when none failed.
func Run(ctx context.Context, checks []Check, report func(Check, Result)) bool {
	good := true
	for _, c := range checks {
		r := c.Run(ctx)
		r.Name = c.Name
		good = good && r.Level != Fail
		report(c, r)
	}
	return good
}

// Print writes one line per result, and below it why it matters and what to do when it
// is not well.
func Print(w io.Writer, c Check, r Result) {
	fmt.Fprintf(w, "%-4s  %-12s  %s\n", r.Level, r.Name, r.Detail)
	if r.Level != OK {
		fmt.Fprintf(w, "      %-12s  needed for: %s\n", "", c.Why)
	}
	if r.Fix != "" {
		fmt.Fprintf(w, "      %-12s  what to do: %s\n", "", r.Fix)
	}
}

func ok(format string, args ...any) Result {
	return Result{Level: OK, Detail: fmt.Sprintf(format, args...)}
}

func warn(fix, format string, args ...any) Result {
	return Result{Level: Warn, Detail: fmt.Sprintf(format, args...), Fix: fix}
}

func fail(fix, format string, args ...any) Result {
	return Result{Level: Fail, Detail: fmt.Sprintf(format, args...), Fix: fix}
}
