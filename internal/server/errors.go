package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strings"

	"connectrpc.com/connect"

	cube "github.com/cubesandbox/cubelet"
	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

// interceptor is the only place that turns errors into statuses. It also keeps a panic
// of one call from ending the daemon.
type interceptor struct{ log *slog.Logger }

// WrapUnary implements connect.Interceptor.
func (i *interceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (res connect.AnyResponse, err error) {
		defer func() {
			if p := recover(); p != nil {
				res, err = nil, recovered(p)
			}
			err = i.finish(ctx, req.Spec().Procedure, err)
		}()
		return next(ctx, req)
	}
}

// WrapStreamingHandler implements connect.Interceptor.
func (i *interceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) (err error) {
		defer func() {
			if p := recover(); p != nil {
				err = recovered(p)
			}
			err = i.finish(ctx, conn.Spec().Procedure, err)
		}()
		return next(ctx, conn)
	}
}

// WrapStreamingClient implements connect.Interceptor; a server has no clients.
func (i *interceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// finish logs what is Cubelet's own fault, once, and gives err its status.
func (i *interceptor) finish(ctx context.Context, procedure string, err error) error {
	if err == nil {
		return nil
	}
	// Only Connect's own errors pass: one that is wrapped comes from a guest's agent.
	if own, ok := err.(*connect.Error); ok { //nolint:errorlint // see above
		return own
	}
	if cube.CodeOf(err) == cube.CodeInternal {
		i.log.ErrorContext(ctx, "call failed", "procedure", procedure, "error", err)
	}
	return status(ctx, err)
}

// panicError is a recovered panic. Its message goes to the caller, its stack only to
// the log.
type panicError struct {
	value any
	stack []byte
}

func (p *panicError) Error() string { return fmt.Sprintf("panic: %v", p.value) }

// LogValue adds the stack to the log.
func (p *panicError) LogValue() slog.Value {
	return slog.StringValue(p.Error() + "\n" + string(p.stack))
}

func recovered(p any) error {
	if p == http.ErrAbortHandler { //nolint:errorlint // net/http compares it the same way
		panic(p)
	}
	return &panicError{value: p, stack: debug.Stack()}
}

// status turns any error into a Connect error with its ErrorDetail.
func status(ctx context.Context, err error) *connect.Error {
	code := cube.CodeOf(err)
	if cause := (*cube.Error)(nil); code == cube.CodeCanceled && errors.As(context.Cause(ctx), &cause) {
		// It was the server that canceled the call, and the cause says why.
		code, err = cause.Code, cause
	}
	out := connect.NewError(rpcCode(code), errors.New(bounded(valid(err.Error()))))
	detail, detailErr := connect.NewErrorDetail(describe(code, err))
	if detailErr == nil {
		out.AddDetail(detail)
	}
	return out
}

// describe collects an error's field, hint and ID: of each, the outermost that is set.
func describe(code cube.Code, err error) *cubev1.ErrorDetail {
	d := &cubev1.ErrorDetail{Reason: Reason(code)}
	for e := (*cube.Error)(nil); errors.As(err, &e); err = e.Err {
		d.Field = first(d.Field, e.Field)
		d.Hint = first(d.Hint, e.Hint)
		d.Id = first(d.Id, e.ID)
		if e.Err == nil {
			break
		}
	}
	d.Field, d.Hint, d.Id = valid(d.Field), valid(d.Hint), valid(d.Id)
	return d
}

func first(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// valid keeps a string that protobuf can carry: errors may quote what a guest wrote.
func valid(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

// The parts of a long message that are kept: statuses travel in HTTP trailers.
const (
	messageHead = 2 << 10
	messageTail = 4 << 10
)

// bounded cuts the middle out of a long message, such as one with a guest's console.
func bounded(s string) string {
	if len(s) <= messageHead+messageTail {
		return s
	}
	return valid(s[:messageHead]) + "\n[...]\n" + valid(s[len(s)-messageTail:])
}

// Reason names a code in ErrorDetail.reason, for example NO_SPACE.
func Reason(c cube.Code) string {
	return strings.ToUpper(strings.ReplaceAll(c.String(), " ", "_"))
}

func rpcCode(c cube.Code) connect.Code {
	switch c {
	case cube.CodeInvalid:
		return connect.CodeInvalidArgument
	case cube.CodeNotFound:
		return connect.CodeNotFound
	case cube.CodeAlreadyExists:
		return connect.CodeAlreadyExists
	case cube.CodeFailedPrecondition:
		return connect.CodeFailedPrecondition
	case cube.CodeResourceExhausted, cube.CodeNoSpace:
		return connect.CodeResourceExhausted
	case cube.CodeUnimplemented:
		return connect.CodeUnimplemented
	case cube.CodeUnavailable:
		return connect.CodeUnavailable
	case cube.CodeDeadlineExceeded:
		return connect.CodeDeadlineExceeded
	case cube.CodeCanceled:
		return connect.CodeCanceled
	case cube.CodePermissionDenied:
		return connect.CodePermissionDenied
	case cube.CodeAborted:
		return connect.CodeAborted
	case cube.CodeInternal:
		return connect.CodeInternal
	}
	return connect.CodeInternal
}
