package guest

import (
	"context"
	"io"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/guestapi"
)

// maxOutput is how much of each output Run keeps, in bytes: the last part.
const maxOutput = 1 << 20

// Run runs a program to its end and returns the last mebibyte of each of its outputs and
// its exit code. The error is about the call, or why the program was killed.
func (c *Client) Run(ctx context.Context, dial guestapi.Dialer, token string, spec cube.ExecSpec) (stdout, stderr []byte, exit int, err error) {
	s, err := c.Exec(ctx, dial, token, spec)
	if err != nil {
		return nil, nil, 0, err
	}
	defer func() { _ = s.Close() }()
	var out, errOut tail
	for {
		ev, err := s.Recv()
		if err != nil {
			return out.bytes(), errOut.bytes(), 0, err
		}
		switch {
		case ev.Exit != nil:
			if ev.Exit.Error != "" {
				err = cube.Errorf(cube.CodeInternal, "%s: %s", ev.Exit.Status, ev.Exit.Error)
			}
			return out.bytes(), errOut.bytes(), ev.Exit.Code, err
		case ev.Stream == cube.StreamStderr:
			_, _ = errOut.Write(ev.Data)
		default:
			_, _ = out.Write(ev.Data)
		}
	}
}

// tail keeps the last maxOutput bytes of what is written to it.
type tail struct{ b []byte }

var _ io.Writer = (*tail)(nil)

// Write implements io.Writer.
func (t *tail) Write(p []byte) (int, error) {
	t.b = append(t.b, p...)
	if len(t.b) > 2*maxOutput {
		t.b = append([]byte(nil), t.b[len(t.b)-maxOutput:]...)
	}
	return len(p), nil
}

func (t *tail) bytes() []byte {
	return t.b[max(len(t.b)-maxOutput, 0):]
}
