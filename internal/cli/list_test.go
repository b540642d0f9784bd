package cli_test

import (
	"os/exec"
	"strings"
	"testing"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/cubetest"
)

func TestListAsksForEveryPage(t *testing.T) {
	n := cubetest.New(t)
	const sandboxes = 1203
	for range sandboxes {
		if _, err := n.Sandboxes().Create(t.Context(), cube.SandboxSpec{TemplateRef: "base"}); err != nil {
			t.Fatal(err)
		}
	}
	out, err := exec.CommandContext(t.Context(), "cubecli", "--address", serve(t, n), "sandbox", "list", "-q").Output()
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Count(string(out), "\n"); got != sandboxes {
		t.Errorf("%d of %d are listed", got, sandboxes)
	}
}
