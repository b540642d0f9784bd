package qemu

import "time"

// rdtsc reads the processor's time stamp counter.
func rdtsc() uint64

// tscWindow is how long the counter is watched. An error of one microsecond at either
// end makes 20 parts per million.
const tscWindow = 50 * time.Millisecond

// measureTSC returns the frequency of the time stamp counter in kHz.
func measureTSC() int {
	epoch := time.Now()
	t0, c0 := sampleTSC(epoch)
	time.Sleep(tscWindow)
	t1, c1 := sampleTSC(epoch)
	return int(float64(c1-c0) * float64(time.Millisecond) / float64(t1-t0))
}

// sampleTSC returns one instant on both clocks, the first as the time since epoch: of
// several readings the one that was disturbed the least.
func sampleTSC(epoch time.Time) (at time.Duration, cycles uint64) {
	best := time.Hour
	for range 16 {
		before := time.Since(epoch)
		c := rdtsc()
		took := time.Since(epoch) - before
		if took < best {
			best = took
			at, cycles = before+took/2, c
		}
	}
	return at, cycles
}
