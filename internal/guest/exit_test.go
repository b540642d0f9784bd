package guest

import (
	"math"
	"testing"

	"github.com/cubesandbox/cubelet/internal/agent/wire"
)

// The number of the signal is the guest's word.
func TestAnySignalNumberOfAGuestIsUnderstood(t *testing.T) {
	for code, want := range map[int32]string{9: "SIGKILL", 15: "SIGTERM", 31: "SIGSYS", 32: "SIG32", 64: "SIG64", 65: "", 0: "", -1: "", math.MinInt32: ""} {
		if got := exitOf(&wire.End{Signal: true, Code: code}).Signal; got != want {
			t.Errorf("signal %d is named %q, want %q", code, got, want)
		}
	}
}
