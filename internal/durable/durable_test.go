package durable

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/google/go-cmp/cmp"
)

// recorder notes each operation relative to its root and fails the one at index fail.
type recorder struct {
	root string
	ops  []string
	fail int
	err  error
}

func newRecorder(root string) *recorder { return &recorder{root: root, fail: -1} }

func (r *recorder) hook(o Op) error {
	rel, err := filepath.Rel(r.root, o.Path)
	if err != nil {
		return err
	}
	r.ops = append(r.ops, Op{Kind: o.Kind, Path: rel}.String())
	if len(r.ops)-1 == r.fail {
		return r.err
	}
	return nil
}

func TestOperationTraces(t *testing.T) {
	for _, tc := range []struct {
		name string
		do   func(f FS, root string) error
		want []string
	}{
		{"write file", func(f FS, root string) error {
			return f.WriteFile(root+"/a", []byte("x"), 0o600)
		}, []string{"create a", "write a", "sync a", "rename a", "syncdir ."}},
		{"mkdir all syncs every new parent", func(f FS, root string) error {
			return f.MkdirAll(root+"/d/e/f", 0o700)
		}, []string{"mkdir d", "syncdir .", "mkdir d/e", "syncdir d", "mkdir d/e/f", "syncdir d/e"}},
		{"mkdir all of an existing directory does nothing", func(f FS, root string) error {
			return f.MkdirAll(root+"/dir", 0o700)
		}, nil},
		{"rename inside one directory", func(f FS, root string) error {
			return f.Rename(root+"/file", root+"/other")
		}, []string{"rename other", "syncdir ."}},
		{"rename across directories syncs the new name first", func(f FS, root string) error {
			return f.Rename(root+"/file", root+"/dir/file")
		}, []string{"rename dir/file", "syncdir dir", "syncdir ."}},
		{"remove", func(f FS, root string) error {
			return f.Remove(root + "/file")
		}, []string{"remove file", "syncdir ."}},
		{"remove of nothing", func(f FS, root string) error {
			return f.Remove(root + "/none")
		}, []string{"remove none"}},
		{"remove all", func(f FS, root string) error {
			return f.RemoveAll(root + "/dir")
		}, []string{"removeall dir", "syncdir ."}},
		{"sync file", func(f FS, root string) error {
			return f.SyncFile(root + "/file")
		}, []string{"sync file"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			root := fixture(t)
			rec := newRecorder(root)
			if err := tc.do(FS{Hook: rec.hook}, root); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, rec.ops); diff != "" {
				t.Errorf("trace (-want +got):\n%s", diff)
			}
		})
	}
}

func fixture(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	if err := os.Mkdir(root+"/dir", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(root+"/file", []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	return root
}

// TestWriteFileFailsAtEveryStep breaks each primitive operation in turn: the error comes
// out, the target holds the old or the new content, and no temporary file is left.
func TestWriteFileFailsAtEveryStep(t *testing.T) {
	for step := range 5 {
		root := fixture(t)
		rec := newRecorder(root)
		rec.fail, rec.err = step, unix.ENOSPC
		err := FS{Hook: rec.hook}.WriteFile(root+"/file", []byte("new"), 0o644)
		if !errors.Is(err, unix.ENOSPC) {
			t.Fatalf("step %d (%s): error %v, want ENOSPC", step, rec.ops[step], err)
		}
		got, err := os.ReadFile(root + "/file")
		if err != nil {
			t.Fatal(err)
		}
		want := "old"
		if strings.HasPrefix(rec.ops[step], string(OpSyncDir)) {
			want = "new"
		}
		if string(got) != want {
			t.Errorf("step %d (%s): content %q, want %q", step, rec.ops[step], got, want)
		}
		entries, err := os.ReadDir(root)
		if err != nil {
			t.Fatal(err)
		}
		if len(entries) != 2 {
			t.Errorf("step %d (%s): left behind: %v", step, rec.ops[step], entries)
		}
	}
}

func TestWriteFileSetsContentAndPermissions(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	for _, perm := range []os.FileMode{0o600, 0o644} {
		if err := WriteFile(path, []byte("hello"), perm); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm() != perm || info.Size() != 5 {
			t.Errorf("mode %v size %d, want %v and 5", info.Mode().Perm(), info.Size(), perm)
		}
	}
}

func TestMkdirAllRefusesAFileInTheWay(t *testing.T) {
	root := fixture(t)
	for _, dir := range []string{root + "/file", root + "/file/below"} {
		if err := MkdirAll(dir, 0o700); !errors.Is(err, unix.ENOTDIR) {
			t.Errorf("MkdirAll(%s) = %v, want ENOTDIR", dir, err)
		}
	}
}

func TestMkdirReportsATakenName(t *testing.T) {
	root := fixture(t)
	if err := Mkdir(root+"/dir", 0o700); !errors.Is(err, fs.ErrExist) {
		t.Errorf("Mkdir of an existing directory = %v, want fs.ErrExist", err)
	}
}

func TestIsTempKnowsOnlyItsOwnFiles(t *testing.T) {
	root := t.TempDir()
	var temp string
	f := FS{Hook: func(o Op) error {
		if o.Kind == OpRename {
			entries, err := os.ReadDir(root)
			if err != nil {
				return err
			}
			temp = entries[0].Name()
		}
		return nil
	}}
	if err := f.WriteFile(root+"/manifest.json", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if !IsTemp(temp) {
		t.Errorf("IsTemp(%q) = false for a file of WriteFile", temp)
	}
	for _, name := range []string{"manifest.json", ".hidden", "a.tmp-1", ""} {
		if IsTemp(name) {
			t.Errorf("IsTemp(%q) = true", name)
		}
	}
}

func TestFlockExcludesAndTellsWhy(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	open := func() *os.File {
		f, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	a, b := open(), open()
	defer b.Close()
	if err := Flock(t.Context(), a, 0); err != nil {
		t.Fatal(err)
	}
	if err := Flock(t.Context(), b, time.Millisecond); !errors.Is(err, ErrLocked) {
		t.Errorf("second lock: %v, want ErrLocked", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Flock(ctx, b, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("second lock with a dead context: %v, want Canceled", err)
	}
	got := make(chan error, 1)
	go func() { got <- Flock(t.Context(), b, time.Minute) }()
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-got; err != nil {
		t.Errorf("lock after the holder closed its file: %v", err)
	}
}
