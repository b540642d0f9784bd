package e2e

import (
	"archive/tar"
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"connectrpc.com/connect"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/cubesandbox/cubelet/internal/testenv"
)

func req[T any](m *T) *connect.Request[T] { return connect.NewRequest(m) }

// TestNode drives one node through everything, in an order in which a part that later
// parts need comes first. One node serves all, since building the base template takes
// longest.
func TestNode(t *testing.T) {
	n := startNode(t)
	for _, part := range []struct {
		name string
		run  func(*testing.T, *node)
	}{
		{"BaseTemplate", testBaseTemplate},
		{"MainPath", testMainPath},
		{"TinyImage", testTinyImage},
		{"StartCommand", testStartCommand},
		{"RegistryPull", testRegistryPull},
		{"BadImages", testBadImages},
		{"BadRequests", testBadRequests},
		{"Exec", testExec},
		{"Copy", testCopy},
		{"Identity", testIdentity},
		{"Network", testNetwork},
		{"TimeToLive", testTimeToLive},
		{"OtherSize", testOtherSize},
		{"IdempotencyKey", testIdempotencyKey},
		{"TemplateInUse", testTemplateInUse},
		{"Jail", testJail},
		{"VMMDies", testVMMDies},
		{"KilledDaemon", testKilledDaemon},
		{"Storm", testStorm},
		{"OverTheWire", testOverTheWire},
		{"Doctor", testDoctor},
	} {
		ok := t.Run(part.name, func(t *testing.T) {
			m := *n
			m.t = t
			part.run(t, &m)
			m.wantNoSandboxes()
			m.wantClean()
			n.proc, n.exited = m.proc, m.exited
		})
		if !ok && part.name == "BaseTemplate" {
			t.FailNow()
		}
	}
}

// wantNoSandboxes expects that the part deleted what it created.
func (n *node) wantNoSandboxes() {
	n.t.Helper()
	if ids := n.must("sandbox", "list", "-q"); ids != "" {
		n.t.Errorf("sandboxes left: %s", ids)
		for _, id := range bytes.Fields([]byte(ids)) {
			n.must("sandbox", "delete", string(id))
		}
	}
}

// guestProgram builds the static program that images without a userland run.
func guestProgram(t *testing.T) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "guestprog")
	cmd := exec.Command("go", "build", "-trimpath", "-o", out, "./test/e2e/guestprog")
	cmd.Dir = testenv.Repo(t)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build guestprog: %v\n%s", err, b)
	}
	return out
}

// tinyImage is an image of one static program at /prog: no shell, no libc, no users.
func tinyImage(t *testing.T, change func(*v1.Config)) v1.Image {
	t.Helper()
	prog, err := os.ReadFile(guestProgram(t))
	if err != nil {
		t.Fatal(err)
	}
	var buf bytes.Buffer
	tw := tar.NewWriter(&buf)
	if err := tw.WriteHeader(&tar.Header{Name: "prog", Mode: 0o755, Size: int64(len(prog)), Typeflag: tar.TypeReg}); err != nil {
		t.Fatal(err)
	}
	if _, err := tw.Write(prog); err != nil {
		t.Fatal(err)
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	layer, err := tarball.LayerFromReader(&buf) //nolint:staticcheck // the buffer is in memory as it is
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		t.Fatal(err)
	}
	cf, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cf = cf.DeepCopy()
	cf.OS, cf.Architecture = "linux", "amd64"
	cf.Config.Entrypoint = []string{"/prog"}
	cf.Config.Cmd = []string{"echo", "from the image"}
	if change != nil {
		change(&cf.Config)
	}
	if img, err = mutate.ConfigFile(img, cf); err != nil {
		t.Fatal(err)
	}
	return img
}

// saveImage writes the image as a `docker save` archive.
func saveImage(t *testing.T, img v1.Image) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image.tar")
	if err := tarball.WriteToFile(path, name.MustParseReference("example.test/tiny:1"), img); err != nil {
		t.Fatal(err)
	}
	return path
}
