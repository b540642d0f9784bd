package guest

import (
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
	processpb "github.com/cubesandbox/cubelet/api/envd/process"
)

// exitOf converts the end of a program.
func exitOf(end *processpb.ProcessEvent_EndEvent) *cube.ExecExit {
	e := &cube.ExecExit{Code: int(end.GetExitCode()), Status: clean(end.GetStatus())}
	if sig := signalOf(end.GetStatus()); sig != 0 && !end.GetExited() {
		e.Code = 128 + int(sig)
		e.Signal = unix.SignalName(sig)
	}
	if e.Code < 0 || e.Code > 255 {
		e.Code = 255
	}
	// The agent repeats the status as the error of a program that failed by itself.
	if text := end.GetError(); text != end.GetStatus() {
		e.Error = clean(text)
	}
	return e
}

// signalOf returns the signal that a status such as "signal: killed" names, 0 for none.
func signalOf(status string) syscall.Signal {
	name, ok := strings.CutPrefix(status, "signal: ")
	if !ok {
		return 0
	}
	name = strings.TrimSuffix(name, " (core dumped)")
	const maxSignal = 64
	for sig := syscall.Signal(1); sig <= maxSignal; sig++ {
		if sig.String() == name {
			return sig
		}
	}
	return 0
}
