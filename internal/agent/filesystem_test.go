package agent

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"connectrpc.com/connect"

	fspb "github.com/cubesandbox/cubelet/api/envd/filesystem"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

func waitFor(t *testing.T, check func() error) {
	t.Helper()
	testenv.Eventually(t, 10*time.Second, check)
}

func TestDirectoriesAreMadeMovedAndRemoved(t *testing.T) {
	f := newFixture(t, Config{})
	ctx, dir := t.Context(), t.TempDir()
	made, err := f.fs.MakeDir(ctx, as("nobody", &fspb.MakeDirRequest{Path: dir + "/a/b"}))
	if err != nil {
		t.Fatal(err)
	}
	e := made.Msg.GetEntry()
	if e.GetName() != "b" || e.GetType() != fspb.FileType_FILE_TYPE_DIRECTORY || e.GetMode() != 0o755 || e.GetPermissions() != "drwxr-xr-x" || e.GetOwner() != "nobody" || e.GetGroup() != "nogroup" {
		t.Errorf("made %v", e)
	}
	_, err = f.fs.MakeDir(ctx, as("", &fspb.MakeDirRequest{Path: dir + "/a/b"}))
	wantCode(t, "make again", err, connect.CodeAlreadyExists)
	if err := os.WriteFile(dir+"/file", nil, 0o640); err != nil {
		t.Fatal(err)
	}
	_, err = f.fs.MakeDir(ctx, as("", &fspb.MakeDirRequest{Path: dir + "/file"}))
	wantCode(t, "make over a file", err, connect.CodeInvalidArgument)
	_, err = f.fs.Move(ctx, as("", &fspb.MoveRequest{Source: dir + "/none", Destination: dir + "/x"}))
	wantCode(t, "move nothing", err, connect.CodeNotFound)
	moved, err := f.fs.Move(ctx, as("", &fspb.MoveRequest{Source: dir + "/file", Destination: dir + "/new/dir/file"}))
	if err != nil || moved.Msg.GetEntry().GetPath() != dir+"/new/dir/file" {
		t.Errorf("moved %v, %v", moved, err)
	}
	for range 2 {
		if _, err := f.fs.Remove(ctx, as("", &fspb.RemoveRequest{Path: dir + "/new"})); err != nil {
			t.Errorf("remove: %v", err)
		}
	}
	if _, err := os.Stat(dir + "/new"); !os.IsNotExist(err) {
		t.Errorf("after remove: %v", err)
	}
	_, err = f.fs.Stat(ctx, as("no-one", &fspb.StatRequest{Path: "/"}))
	wantCode(t, "unknown user", err, connect.CodeUnauthenticated)
	st, err := f.fs.WatchDir(ctx, as("", &fspb.WatchDirRequest{Path: dir}))
	if err == nil {
		st.Receive()
		err = st.Err()
		st.Close()
	}
	wantCode(t, "watch", err, connect.CodeUnimplemented)
}

func TestStatFollowsLinks(t *testing.T) {
	f := newFixture(t, Config{})
	ctx, dir := t.Context(), t.TempDir()
	if err := os.WriteFile(dir+"/file", []byte("abc"), 0o644); err != nil {
		t.Fatal(err)
	}
	for name, target := range map[string]string{"link": "file", "loop": "loop", "dangling": "none"} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	stat := func(name string) (*fspb.EntryInfo, error) {
		r, err := f.fs.Stat(ctx, as("", &fspb.StatRequest{Path: filepath.Join(dir, name)}))
		if err != nil {
			return nil, err
		}
		return r.Msg.GetEntry(), nil
	}
	e, err := stat("file")
	if err != nil || e.GetType() != fspb.FileType_FILE_TYPE_FILE || e.GetSize() != 3 || e.GetMode() != 420 || e.GetPermissions() != "-rw-r--r--" || e.SymlinkTarget != nil {
		t.Errorf("file: %v, %v", e, err)
	}
	e, err = stat("link")
	if err != nil || e.GetType() != fspb.FileType_FILE_TYPE_FILE || e.GetSymlinkTarget() != filepath.Join(dir, "file") {
		t.Errorf("link: %v, %v", e, err)
	}
	if e, err = stat("dangling"); err != nil || e.GetType() != fspb.FileType_FILE_TYPE_SYMLINK {
		t.Errorf("dangling: %v, %v", e, err)
	}
	_, err = stat("loop")
	wantCode(t, "loop", err, connect.CodeFailedPrecondition)
	_, err = stat("none")
	wantCode(t, "missing", err, connect.CodeNotFound)
	home, err := f.fs.Stat(ctx, as("", &fspb.StatRequest{Path: "~"}))
	if err != nil || home.Msg.GetEntry().GetPath() != "/root" {
		t.Errorf("home: %v, %v", home, err)
	}
}

func TestListsAreSortedAndBoundedInDepth(t *testing.T) {
	f := newFixture(t, Config{})
	ctx, dir := t.Context(), t.TempDir()
	if err := os.MkdirAll(dir+"/b/c/d", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/a", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("b", dir+"/link"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("loop", dir+"/loop"); err != nil {
		t.Fatal(err)
	}
	for depth, want := range map[uint32][]string{
		0: {"a", "b", "link", "loop"}, 1: {"a", "b", "link", "loop"}, 2: {"a", "b", "b/c", "link", "loop"}, 9: {"a", "b", "b/c", "b/c/d", "link", "loop"},
	} {
		r, err := f.fs.ListDir(ctx, as("", &fspb.ListDirRequest{Path: dir, Depth: depth}))
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, e := range r.Msg.GetEntries() {
			rel, err := filepath.Rel(dir, e.GetPath())
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, rel)
		}
		if len(got) != len(want) {
			t.Errorf("depth %d: %v, want %v", depth, got, want)
			continue
		}
		for i := range want {
			if got[i] != want[i] {
				t.Errorf("depth %d: %v, want %v", depth, got, want)
			}
		}
	}
	_, err := f.fs.ListDir(ctx, as("", &fspb.ListDirRequest{Path: dir + "/a"}))
	wantCode(t, "list a file", err, connect.CodeInvalidArgument)
	_, err = f.fs.ListDir(ctx, as("", &fspb.ListDirRequest{Path: dir + "/none"}))
	wantCode(t, "list nothing", err, connect.CodeNotFound)
}
