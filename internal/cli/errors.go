package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"strings"
	"syscall"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	cube "github.com/cubesandbox/cubelet"
	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

// usageError is a mistake on the command line.
type usageError struct {
	cmd *cobra.Command
	err error
}

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

// flagError is a flag whose value cannot be used.
type flagError struct {
	flag string
	err  error
}

func (e *flagError) Error() string { return "--" + e.flag + ": " + e.err.Error() }
func (e *flagError) Unwrap() error { return e.err }

func badFlag(flag, format string, args ...any) error {
	return &flagError{flag, cube.Errorf(cube.CodeInvalid, format, args...)}
}

// opError says what was attempted, and on which of several objects.
type opError struct {
	op     string
	object string // empty when the operation has only one
	err    error
}

func (e *opError) Error() string { return e.prefix(e.err.Error()) }
func (e *opError) Unwrap() error { return e.err }

// during names what was attempted; nil stays nil.
func during(op string, err error) error {
	if err == nil {
		return nil
	}
	return &opError{op: op, err: err}
}

// exitError ends cubecli with a code of its own and no message.
type exitError struct{ code int }

func (e *exitError) Error() string { return fmt.Sprintf("exit code %d", e.code) }

// coded gives an error another exit code, keeping its message.
type coded struct {
	error
	code int
}

func (e *coded) Unwrap() error { return e.error }

// report shows an error to a person and returns the exit code for it.
func report(w io.Writer, err error) int {
	if err == nil {
		return 0
	}
	if exit := (*exitError)(nil); errors.As(err, &exit) {
		return exit.code
	}
	_, _ = io.WriteString(w, describe(err)) // nothing is left to say if that fails
	return exitCode(err)
}

// describe words an error: what failed and why, its code, the field and what to do.
func describe(err error) string {
	p := explain(err)
	var b strings.Builder
	fmt.Fprintf(&b, "Error: %s", clean(p.text))
	if p.code != "" {
		fmt.Fprintf(&b, " (%s)", p.code)
	}
	b.WriteByte('\n')
	if p.field != "" && !strings.Contains(p.text, p.field) {
		fmt.Fprintf(&b, "Field: %s\n", clean(p.field))
	}
	if p.hint != "" {
		fmt.Fprintf(&b, "Hint: %s\n", clean(p.hint))
	}
	if usage := (*usageError)(nil); errors.As(err, &usage) {
		fmt.Fprintf(&b, "Run '%s --help' for usage.\n", usage.cmd.CommandPath())
	}
	return b.String()
}

type explained struct{ text, code, field, hint string }

func explain(err error) explained {
	p := explained{text: err.Error()}
	var remote *connect.Error
	var own *cube.Error
	var lost *lostError
	switch {
	case errors.As(err, &lost):
		return unreachable(err, lost)
	case errors.As(err, &remote):
		p.text = prefixed(err, remote.Message())
		p.code = codeName(remote.Code())
		d := detail(remote)
		p.field, p.hint = d.GetField(), d.GetHint()
	case errors.As(err, &own):
		p.code, p.field, p.hint = codeName(codeOf(err)), own.Field, own.Hint
	}
	return p
}

// prefix puts what was attempted in front of a message, unless that says so itself. An
// object that both name is named once.
func (e *opError) prefix(message string) string {
	switch {
	case strings.HasPrefix(message, e.op):
		return message
	case e.object == "":
		return e.op + ": " + message
	}
	return e.op + " " + e.object + ": " + strings.TrimPrefix(message, e.object+": ")
}

func prefixed(err error, message string) string {
	var op *opError
	if !errors.As(err, &op) {
		return message
	}
	return op.prefix(message)
}

// lostError is a call that got no answer from the node.
type lostError struct {
	local bool // the node runs on this machine
	err   error
}

func (e *lostError) Error() string { return e.err.Error() }
func (e *lostError) Unwrap() error { return e.err }

// unreachable words an error of the connection: there is no answer to quote.
func unreachable(err error, lost *lostError) explained {
	p := explained{code: codeName(connect.CodeUnavailable)}
	dial := (*net.OpError)(nil)
	dialing := errors.As(err, &dial) && dial.Op == "dial"
	if dialing {
		p.text = prefixed(err, fmt.Sprintf("cannot reach the node at %s: %v", dial.Addr, dial.Err))
	} else {
		p.text = prefixed(err, fmt.Sprintf("no answer from the node: %v", lost))
	}
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		p.hint = "Is cubelet running? Start it, or name another address with --address or CUBELET_ADDRESS."
	case errors.Is(err, fs.ErrPermission):
		p.hint = "Only root and the user that runs cubelet may connect; try sudo."
	case !lost.local && !dialing:
		p.hint = "A node closes connections without a client certificate that it accepts."
	}
	return p
}

func detail(err *connect.Error) *cubev1.ErrorDetail {
	for _, d := range err.Details() {
		if v, err := d.Value(); err == nil {
			if e, ok := v.(*cubev1.ErrorDetail); ok {
				return e
			}
		}
	}
	return nil
}

// codeName is the code as gRPC's documentation writes it, for example NotFound.
func codeName(c connect.Code) string {
	var b strings.Builder
	for part := range strings.SplitSeq(c.String(), "_") {
		b.WriteString(strings.ToUpper(part[:1]) + part[1:])
	}
	return b.String()
}

func codeOf(err error) connect.Code {
	var remote *connect.Error
	if errors.As(err, &remote) {
		return remote.Code()
	}
	if errors.Is(err, context.Canceled) {
		return connect.CodeCanceled
	}
	if own := (*cube.Error)(nil); errors.As(err, &own) && own.Code == cube.CodeInvalid {
		return connect.CodeInvalidArgument
	}
	switch cube.CodeOf(err) {
	case cube.CodeNotFound:
		return connect.CodeNotFound
	case cube.CodeFailedPrecondition:
		return connect.CodeFailedPrecondition
	case cube.CodeUnavailable:
		return connect.CodeUnavailable
	case cube.CodeDeadlineExceeded:
		return connect.CodeDeadlineExceeded
	case cube.CodePermissionDenied:
		return connect.CodePermissionDenied
	default:
		return connect.CodeUnknown
	}
}

// where adds to an error of decoding text as JSON the place of the fault.
func where(text string, err error) error {
	var syntax *json.SyntaxError
	var mismatch *json.UnmarshalTypeError
	at := int64(0)
	switch {
	case errors.As(err, &syntax):
		at = syntax.Offset
	case errors.As(err, &mismatch):
		at = mismatch.Offset
	case errors.Is(err, io.ErrUnexpectedEOF):
		at = int64(len(text))
	}
	if at <= 0 || at > int64(len(text)) {
		return err
	}
	const around = 20
	from := max(0, at-around)
	return fmt.Errorf("%w, at character %d, after `%s`", err, at, text[from:at])
}
