package cli

import (
	"errors"
	"fmt"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
)

// The exit codes that are not those of a program run by exec.
const (
	exitFailure     = 1
	exitUsage       = 2
	exitExecFailure = 125
	exitInterrupted = 130
)

type exitMeaning struct {
	code  int
	text  string
	codes []connect.Code
}

func exitCodes() []exitMeaning {
	return []exitMeaning{
		{0, "success", nil},
		{exitFailure, "any other failure", nil},
		{exitUsage, "wrong flag, argument or request", []connect.Code{connect.CodeInvalidArgument}},
		{3, "the object does not exist", []connect.Code{connect.CodeNotFound}},
		{4, "the object exists already and differs", []connect.Code{connect.CodeAlreadyExists}},
		{5, "the object's state does not allow it", []connect.Code{connect.CodeFailedPrecondition, connect.CodeAborted}},
		{6, "a limit is reached, or the pool is full", []connect.Code{connect.CodeResourceExhausted}},
		{7, "the node does not answer", []connect.Code{connect.CodeUnavailable}},
		{8, "the deadline passed", []connect.Code{connect.CodeDeadlineExceeded}},
		{9, "not permitted", []connect.Code{connect.CodePermissionDenied, connect.CodeUnauthenticated}},
		{10, "the node does not have the feature", []connect.Code{connect.CodeUnimplemented}},
		{exitExecFailure, "`sandbox exec` itself failed; any other code is the program's own", nil},
		{exitInterrupted, "interrupted by the user", []connect.Code{connect.CodeCanceled}},
	}
}

func exitCode(err error) int {
	if own := (*coded)(nil); errors.As(err, &own) {
		return own.code
	}
	if usage := (*usageError)(nil); errors.As(err, &usage) {
		return exitUsage
	}
	if flag := (*flagError)(nil); errors.As(err, &flag) {
		return exitUsage
	}
	if lost := (*lostError)(nil); errors.As(err, &lost) {
		return exitCodeOf(connect.CodeUnavailable)
	}
	return exitCodeOf(codeOf(err))
}

func exitCodeOf(code connect.Code) int {
	for _, m := range exitCodes() {
		for _, c := range m.codes {
			if c == code {
				return m.code
			}
		}
	}
	return exitFailure
}

// exitCodesTopic is shown by `cubecli help exit-codes`.
func exitCodesTopic() *cobra.Command {
	var b strings.Builder
	b.WriteString("cubecli ends with one of these codes:\n\n")
	for _, m := range exitCodes() {
		names := make([]string, len(m.codes))
		for i, c := range m.codes {
			names[i] = codeName(c)
		}
		fmt.Fprintf(&b, "  %3d  %s", m.code, m.text)
		if len(names) > 0 {
			fmt.Fprintf(&b, " (%s)", strings.Join(names, ", "))
		}
		b.WriteByte('\n')
	}
	b.WriteString(`
A program that a signal killed has 128 plus the signal's number. A command on several
objects goes on after a failure and ends with the code of the first one.`)
	return &cobra.Command{Use: "exit-codes", Short: "What cubecli's exit codes mean", Long: b.String()}
}
