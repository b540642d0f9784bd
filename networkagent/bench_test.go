package networkagent

import (
	"context"
	"fmt"
	"testing"

	cube "github.com/cubesandbox/cubelet"
)

func BenchmarkClaimPrepared(b *testing.B) {
	newWorld(b)
	a := start(b, testConfig(b, "t"))
	for i := 0; b.Loop(); i++ {
		b.StopTimer()
		must(b, a.addWaiting(context.Background()))
		owner := fmt.Sprintf("sbx-%d", i)
		b.StartTimer()
		tap := claimFor(b, a, owner, cube.NetworkSpec{})
		b.StopTimer()
		must(b, tap.Close())
		must(b, a.Release(context.Background(), owner))
		b.StartTimer()
	}
}

func BenchmarkClaimPreparedWithSubnet(b *testing.B) {
	newWorld(b)
	a := start(b, testConfig(b, "t"))
	for i := 0; b.Loop(); i++ {
		b.StopTimer()
		must(b, a.addWaiting(context.Background()))
		owner := fmt.Sprintf("sbx-%d", i)
		b.StartTimer()
		tap := claimFor(b, a, owner, cube.NetworkSpec{CIDR: "192.168.10.0/24"})
		b.StopTimer()
		must(b, tap.Close())
		must(b, a.Release(context.Background(), owner))
		b.StartTimer()
	}
}

func BenchmarkMakeSlot(b *testing.B) {
	newWorld(b)
	a := start(b, testConfig(b, "t"))
	for b.Loop() {
		s, err := a.makeSlot(context.Background())
		must(b, err)
		b.StopTimer()
		must(b, s.tap.Close())
		must(b, a.destroy(s.name))
		b.StartTimer()
	}
}

func BenchmarkDestroySlot(b *testing.B) {
	newWorld(b)
	a := start(b, testConfig(b, "t"))
	for b.Loop() {
		b.StopTimer()
		s, err := a.makeSlot(context.Background())
		must(b, err)
		must(b, s.tap.Close())
		b.StartTimer()
		must(b, a.destroy(s.name))
	}
}

func BenchmarkDial(b *testing.B) {
	newWorld(b)
	a := start(b, testConfig(b, "t"))
	newGuest(b, claimFor(b, a, "one", cube.NetworkSpec{})).listen(b, ":80", echo)
	for b.Loop() {
		c, err := a.Dial(context.Background(), "one", 80)
		must(b, err)
		must(b, c.Close())
	}
}
