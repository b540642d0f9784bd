package archtest

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/cubesandbox/cubelet/internal/testenv"
)

const module = "github.com/cubesandbox/cubelet"

// layer says what the packages below one path (a final /... counts all below) may
// import of this module. Packages that are listed earlier are decided first.
type layer struct {
	path string
	may  []string
}

// data is what any package may import: words and values, no effects.
var data = []string{"", "internal/vmm", "internal/guestapi", "internal/tplimage", "internal/flow"}

// layers is the table of import directions. The rule behind it: server -> sandbox ->
// flow -> adapter at run time, but by import everything points at package cube; an
// adapter sees no other adapter and not the engine, and only the wiring sees them all.
var layers = []layer{
	{"", nil},
	{"api/...", []string{"api/..."}},
	{"internal/vmm", nil},
	{"internal/guestapi", nil},
	{"internal/flow", []string{""}},
	{"internal/tplimage", []string{""}},

	// Tools that adapters share. They know nothing of sandboxes.
	{"internal/durable", nil},
	{"internal/launch", nil},
	{"internal/pagemap", nil},
	{"internal/image/erofs", nil},
	{"internal/agent/wire", nil},

	// Adapters: one kind of host object each.
	{"storage/...", with(data, "internal/durable")},
	{"networkagent/...", data},
	{"internal/containerd", data},
	{"internal/runc", with(data, "internal/launch")},
	{"internal/vmm/qemu/...", with(data, "internal/pagemap")},
	{"internal/initramfs", with(data, "internal/durable")},
	{"internal/guest", with(data, "api/envd/...", "internal/agent/wire")},
	{"internal/image", with(data, "internal/image/erofs")},
	{"internal/template", with(data, "internal/durable")},
	{"internal/journal", with(data, "internal/durable")},
	{"internal/hostmount", with(data, "internal/durable")},
	{"internal/health", data},
	{"internal/doctor", data},

	// In the guest.
	{"internal/agent/...", []string{"internal/agent/...", "api/envd/..."}},

	// The engine, and the front that sees only package cube.
	{"internal/sandbox", data},
	{"internal/server", []string{"", "api/..."}},
	{"internal/cli", []string{"", "api/..."}},

	// Wiring and tests.
	{"internal/daemon", []string{"..."}},
	{"cmd/...", []string{"..."}},
	{"internal/...", []string{"..."}},
	{"test/...", []string{"..."}},
}

// wiring is who may import an adapter, or the engine.
var wiring = []string{"internal/daemon", "cmd/...", "internal/hosttest", "test/..."}

func with(base []string, more ...string) []string { return append(slices.Clone(base), more...) }

// covers tells whether path is pattern, or below it where it ends in "...".
func covers(pattern, path string) bool {
	if prefix, ok := strings.CutSuffix(pattern, "..."); ok {
		return path+"/" == prefix || strings.HasPrefix(path, prefix)
	}
	return pattern == path
}

func coversAny(patterns []string, path string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool { return covers(p, path) })
}

type goPackage struct {
	ImportPath string
	Standard   bool
	Imports    []string
	Error      *struct{ Err string }
}

func (p goPackage) path() string {
	return strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/")
}

func list(t *testing.T, args ...string) []goPackage {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-e", "-json=ImportPath,Standard,Imports,Error"}, args...)...)
	cmd.Dir = testenv.Repo(t)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, &stderr)
	}
	var packages []goPackage
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p goPackage
		err := dec.Decode(&p)
		if errors.Is(err, io.EOF) {
			return packages
		}
		if err != nil {
			t.Fatal(err)
		}
		packages = append(packages, p)
	}
}

func TestImportsPointInTheAgreedDirections(t *testing.T) {
	for _, p := range list(t, "./...") {
		i := slices.IndexFunc(layers, func(l layer) bool { return covers(l.path, p.path()) })
		if i < 0 {
			t.Errorf("%s is in no layer: add it to the table", p.ImportPath)
			continue
		}
		for _, imp := range p.Imports {
			if imp != module && !strings.HasPrefix(imp, module+"/") {
				continue
			}
			path := goPackage{ImportPath: imp}.path()
			if !coversAny(layers[i].may, path) {
				t.Errorf("%s must not import %s", p.ImportPath, imp)
			}
		}
	}
}

func TestOnlyWiringImportsAdapters(t *testing.T) {
	adapters := []string{
		"storage", "networkagent", "internal/containerd", "internal/runc", "internal/vmm/qemu", "internal/guest",
		"internal/image", "internal/template", "internal/journal", "internal/hostmount", "internal/sandbox", "internal/server",
	}
	for _, p := range list(t, "./...") {
		if coversAny(wiring, p.path()) {
			continue
		}
		for _, imp := range p.Imports {
			if path := (goPackage{ImportPath: imp}).path(); strings.HasPrefix(imp, module) && slices.Contains(adapters, path) {
				t.Errorf("%s must not import the adapter %s", p.ImportPath, imp)
			}
		}
	}
}

func TestVocabularyDependsOnTheStandardLibraryOnly(t *testing.T) {
	for _, p := range list(t, "-deps", ".") {
		if !p.Standard && p.ImportPath != module {
			t.Errorf("package cube depends on %s", p.ImportPath)
		}
	}
}

func TestTheGuestAgentAndTheLauncherStaySmall(t *testing.T) {
	for _, program := range []string{"./cmd/cube-agent", "./cmd/vmm-launcher"} {
		for _, p := range list(t, "-deps", program) {
			for _, heavy := range []string{"github.com/containerd/", "google.golang.org/grpc", "github.com/spf13/", module + "/internal/sandbox"} {
				if strings.HasPrefix(p.ImportPath, heavy) && p.ImportPath != "google.golang.org/grpc/codes" {
					t.Errorf("%s depends on %s", program, p.ImportPath)
				}
			}
		}
	}
}
