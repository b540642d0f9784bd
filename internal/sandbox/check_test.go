package sandbox_test

import (
	"testing"

	"github.com/cubesandbox/cubelet/internal/hosttest"
)

func TestCheckFindsStraysAndLostSandboxesAndNothingElse(t *testing.T) {
	m, w, _ := start(t)
	none := func(string) bool { return false }
	sb, err := m.Create(t.Context(), base())
	if err != nil {
		t.Fatal(err)
	}
	if found, err := m.Check(t.Context(), none); err != nil || len(found) != 0 {
		t.Errorf("a healthy node: %v, %v", found, err)
	}
	if _, err := (hosttest.Disks{W: w}).Create(t.Context(), "s-stray"); err != nil {
		t.Fatal(err)
	}
	if _, err := (hosttest.Disks{W: w}).Create(t.Context(), "tpl-building"); err != nil {
		t.Fatal(err)
	}
	if err := (hosttest.Network{W: w}).Release(t.Context(), sb.ID); err != nil {
		t.Fatal(err)
	}
	found, err := m.Check(t.Context(), func(o string) bool { return o == "tpl-building" })
	if err != nil || len(found) != 2 {
		t.Fatalf("found %v, %v; want the lost one and the stray", found, err)
	}
	if found[0].Object != sb.ID || found[1].Object != "s-stray" {
		t.Errorf("found %v", found)
	}
}
