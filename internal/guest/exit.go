package guest

import (
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/agent/wire"
)

// exitOf converts the end of a program, whose numbers the guest chose.
func exitOf(end *wire.End) *cube.ExecExit {
	const maxCode, maxSignal = 255, 64
	e := &cube.ExecExit{Error: clean(end.Reason)}
	if !end.Signal || end.Code < 1 || end.Code > maxSignal {
		e.Code = int(min(max(end.Code, 0), maxCode))
		e.Status = fmt.Sprintf("exit status %d", e.Code)
		return e
	}
	sig := syscall.Signal(end.Code)
	e.Code = 128 + int(sig)
	if e.Signal = unix.SignalName(sig); e.Signal == "" {
		e.Signal = fmt.Sprintf("SIG%d", int(sig))
	}
	e.Status = "signal: " + sig.String()
	if end.Core {
		e.Status += " (core dumped)"
	}
	return e
}
