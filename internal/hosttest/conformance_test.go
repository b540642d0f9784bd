package hosttest

import (
	"os"
	"testing"

	"github.com/cubesandbox/cubelet/internal/vmm"
)

func TestTheFakesKeepToTheContract(t *testing.T) {
	w := NewWorld()
	RunDisks(t, Disks{w}, "/t/layer", "/t/missing")
	RunNetwork(t, Network{w})
	tap, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer tap.Close()
	RunVMMs(t, VMMCase{VMMs: VMMs{w}, Machine: vmm.Machine{StatePath: "/t/state"}, Tap: tap})
	if left := w.String(); left != "" {
		t.Errorf("left behind:\n%s", left)
	}
}
