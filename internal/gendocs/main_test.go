package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/cubesandbox/cubelet/internal/testenv"
)

func TestStatesDocumentIsCurrent(t *testing.T) {
	got, err := os.ReadFile(filepath.Join(testenv.Repo(t), "docs", "states.md"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(states(), string(got)); diff != "" {
		t.Errorf("docs/states.md is not what the phase table says; run `go run ./internal/gendocs` (-want +got):\n%s", diff)
	}
}
