package guest

import (
	"fmt"
	"strings"
	"syscall"

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
	e.Signal = signalName(int(sig))
	e.Status = "signal: " + sig.String()
	if end.Core {
		e.Status += " (core dumped)"
	}
	return e
}

// signalNames are Linux's names of the signals from 1 on.
const signalNames = "HUP INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM STKFLT " +
	"CHLD CONT STOP TSTP TTIN TTOU URG XCPU XFSZ VTALRM PROF WINCH IO PWR SYS"

// signalName names a signal by its number, at least 1.
func signalName(sig int) string {
	if names := strings.Fields(signalNames); sig <= len(names) {
		return "SIG" + names[sig-1]
	}
	return fmt.Sprintf("SIG%d", sig)
}
