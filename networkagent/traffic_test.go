package networkagent

import (
	"testing"

	cube "github.com/cubesandbox/cubelet"
)

func TestGuestReachesTheInternetAsTheHost(t *testing.T) {
	newWorld(t)
	a := start(t, testConfig(t, "t"))
	g := newGuest(t, claimFor(t, a, "one", cube.NetworkSpec{}))
	from, err := g.get(siteAddr)
	must(t, err)
	if from != hostAddr {
		t.Errorf("the site was called from %q, want the host's address %s", from, hostAddr)
	}
}
