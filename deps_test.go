package cube_test

import (
	"go/parser"
	"go/token"
	"os"
	"strconv"
	"strings"
	"testing"
)

// TestVocabularyNeedsTheStandardLibraryOnly keeps package cube at the bottom: everything
// may import it, so it imports nothing of ours or of others, and does no I/O.
func TestVocabularyNeedsTheStandardLibraryOnly(t *testing.T) {
	entries, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	files := 0
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".go") || strings.HasSuffix(e.Name(), "_test.go") {
			continue
		}
		files++
		f, err := parser.ParseFile(token.NewFileSet(), e.Name(), nil, parser.ImportsOnly)
		if err != nil {
			t.Fatal(err)
		}
		for _, spec := range f.Imports {
			path, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				t.Fatal(err)
			}
			first, _, _ := strings.Cut(path, "/")
			switch {
			case strings.Contains(first, "."):
				t.Errorf("%s imports %s, which is not of the standard library", e.Name(), path)
			case path == "os", path == "os/exec", path == "net/http", path == "unsafe", path == "C":
				t.Errorf("%s imports %s: the vocabulary does no I/O", e.Name(), path)
			}
		}
	}
	if files == 0 {
		t.Fatal("no files of package cube here")
	}
}
