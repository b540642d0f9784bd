package cube

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
)

// Code classifies an error by what the caller can do about it. internal/server
// turns it into a gRPC status in exactly one place.
type Code int

// The codes. Their gRPC counterparts are named where the name differs.
const (
	// CodeInternal is a fault of Cubelet or of its host. The zero value, so that
	// an unclassified error never looks like the caller's mistake.
	CodeInternal Code = iota
	// CodeInvalid means the request can never succeed as it is (InvalidArgument).
	CodeInvalid
	// CodeNotFound means that the named object does not exist.
	CodeNotFound
	// CodeAlreadyExists means an object with that name or key exists and differs.
	CodeAlreadyExists
	// CodeFailedPrecondition means the object is not in a state that allows the call.
	CodeFailedPrecondition
	// CodeResourceExhausted means a limit is reached; the same call may work later.
	CodeResourceExhausted
	// CodeNoSpace means the pool is full (ResourceExhausted with reason NO_SPACE).
	CodeNoSpace
	// CodeUnimplemented means this build does not have the feature.
	CodeUnimplemented
	// CodeUnavailable means a part that is needed does not answer now; retry.
	CodeUnavailable
	// CodeDeadlineExceeded means that the caller's deadline passed.
	CodeDeadlineExceeded
	// CodeCanceled means that the caller went away.
	CodeCanceled
	// CodePermissionDenied means that the peer may not make this call.
	CodePermissionDenied
	// CodeAborted means that a concurrent call won, for example a delete.
	CodeAborted
)

var codeNames = [...]string{
	CodeInternal:           "internal",
	CodeInvalid:            "invalid argument",
	CodeNotFound:           "not found",
	CodeAlreadyExists:      "already exists",
	CodeFailedPrecondition: "failed precondition",
	CodeResourceExhausted:  "resource exhausted",
	CodeNoSpace:            "no space",
	CodeUnimplemented:      "unimplemented",
	CodeUnavailable:        "unavailable",
	CodeDeadlineExceeded:   "deadline exceeded",
	CodeCanceled:           "canceled",
	CodePermissionDenied:   "permission denied",
	CodeAborted:            "aborted",
}

// String names the code as people read it.
func (c Code) String() string {
	if c < 0 || int(c) >= len(codeNames) {
		return fmt.Sprintf("code(%d)", int(c))
	}
	return codeNames[c]
}

// Error is the one error type that crosses package boundaries with a meaning.
// Every field but Code is optional.
type Error struct {
	Code  Code
	Op    string // what was attempted, for example "create sandbox"
	ID    string // the object concerned
	Field string // path of the request field at fault, for example "network.cidr"
	Hint  string // what the caller can do about it, one sentence
	Err   error  // the cause
}

// Error renders "op id: field: cause" from the parts that are set. The hint is
// left to whoever shows the error to a person.
func (e *Error) Error() string {
	var parts []string
	if head := strings.TrimSpace(e.Op + " " + e.ID); head != "" {
		parts = append(parts, head)
	}
	if e.Field != "" {
		parts = append(parts, e.Field)
	}
	if e.Err != nil {
		parts = append(parts, e.Err.Error())
	} else {
		parts = append(parts, e.Code.String())
	}
	return strings.Join(parts, ": ")
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Errorf returns an *Error of the code with a formatted cause (%w works).
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Err: fmt.Errorf(format, args...)}
}

// InvalidField returns a CodeInvalid error about one request field.
func InvalidField(field, format string, args ...any) *Error {
	return &Error{Code: CodeInvalid, Field: field, Err: fmt.Errorf(format, args...)}
}

// WithHint returns a copy of e that carries the hint.
func (e *Error) WithHint(format string, args ...any) *Error {
	c := *e
	c.Hint = fmt.Sprintf(format, args...)
	return &c
}

// CodeOf classifies any error: the outermost *Error wins, then context errors and
// ENOSPC/EDQUOT are recognised, everything else is CodeInternal.
func CodeOf(err error) Code {
	var e *Error
	switch {
	case errors.As(err, &e):
		return e.Code
	case errors.Is(err, context.DeadlineExceeded):
		return CodeDeadlineExceeded
	case errors.Is(err, context.Canceled):
		return CodeCanceled
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return CodeNoSpace
	}
	return CodeInternal
}

// IsNotFound reports whether err is of CodeNotFound.
func IsNotFound(err error) bool { return err != nil && CodeOf(err) == CodeNotFound }
