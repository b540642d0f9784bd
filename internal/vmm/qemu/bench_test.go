package qemu

import (
	"context"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/cubesandbox/cubelet/internal/vmm"
)

// BenchmarkColdBoot measures a launch up to the first answer of the guest's init.
func BenchmarkColdBoot(b *testing.B) {
	w := newWorld(b)
	for i := 0; b.Loop(); i++ {
		owner := fmt.Sprintf("cold-%d", i)
		m := w.machine(owner)
		m.Boot, m.MemoryPath = &w.boot, w.path(owner+".memory")
		w.mustLaunch(owner, m).dial().ticks()
		b.StopTimer()
		w.destroy(owner)
		_ = os.Remove(m.MemoryPath)
		b.StartTimer()
	}
}

// BenchmarkRestore measures a launch in a waiting slot until the clone runs, and
// reports its median and the median time to the clone's first answer.
func BenchmarkRestore(b *testing.B) {
	w := newWorld(b)
	w.bootTemplate().dial().must("set kept", "ok")
	w.sealTemplate()
	ctx := context.Background()
	var launched, answered []time.Duration
	for i := 0; b.Loop(); i++ {
		b.StopTimer()
		owner := fmt.Sprintf("clone-%d", i)
		m, g := w.restored(owner), newGuestNet(b)
		if _, err := w.driver.Claim(ctx, owner, vmm.Limits{}); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		start := time.Now()
		if _, err := w.driver.Launch(ctx, owner, m, g.tap); err != nil {
			b.Fatal(err)
		}
		launched = append(launched, time.Since(start))
		b.StopTimer()
		g.dial().must("get", "kept")
		answered = append(answered, time.Since(start))
		w.destroy(owner)
		b.StartTimer()
	}
	slices.Sort(launched)
	slices.Sort(answered)
	b.ReportMetric(float64(launched[len(launched)/2].Microseconds())/1000, "p50-ms/launch")
	b.ReportMetric(float64(answered[len(answered)/2].Microseconds())/1000, "p50-ms/answer")
}
