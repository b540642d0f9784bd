package storage

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
)

// eachKind runs the test on a pool with reflinks and on one without.
func eachKind(t *testing.T, test func(t *testing.T, p *Pool)) {
	t.Run("xfs", func(t *testing.T) { test(t, newPool(t)) })
	t.Run("no reflink", func(t *testing.T) { test(t, plainPool(t)) })
}

func TestDisksAreCreatedListedAndRemoved(t *testing.T) {
	eachKind(t, func(t *testing.T, p *Pool) {
		ctx := t.Context()
		for _, owner := range []string{"sb-2", "sb-1"} {
			dir := create(t, p, owner)
			info, err := os.Stat(dir)
			if err != nil || info.Mode().Perm() != 0o700 {
				t.Errorf("%s: %v, %v", dir, info.Mode(), err)
			}
		}
		if _, err := p.Create(ctx, "sb-1"); cube.CodeOf(err) != cube.CodeAlreadyExists {
			t.Errorf("second create: %v, want AlreadyExists", err)
		}
		if got, err := p.List(ctx); err != nil || cmp.Diff([]string{"sb-1", "sb-2"}, got) != "" {
			t.Errorf("List = %v, %v", got, err)
		}
		for range 2 {
			if err := p.Remove(ctx, "sb-1"); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := p.List(ctx); err != nil || cmp.Diff([]string{"sb-2"}, got) != "" {
			t.Errorf("List after Remove = %v, %v", got, err)
		}
	})
}

func TestNamesCannotLeaveThePool(t *testing.T) {
	p := plainPool(t)
	for _, owner := range []string{"", ".", "..", "../templates", "a/b", "a\x00b", "A", "sb_1", "é", strings.Repeat("a", 65)} {
		if _, err := p.Create(t.Context(), owner); cube.CodeOf(err) != cube.CodeInvalid {
			t.Errorf("Create(%q) = %v, want Invalid", owner, err)
		}
		if err := p.Remove(t.Context(), owner); cube.CodeOf(err) != cube.CodeInvalid {
			t.Errorf("Remove(%q) = %v, want Invalid", owner, err)
		}
		if _, err := p.SandboxDir(owner); cube.CodeOf(err) != cube.CodeInvalid {
			t.Errorf("SandboxDir(%q) = %v, want Invalid", owner, err)
		}
	}
	src := filepath.Join(p.ScratchDir(), "src")
	writeFile(t, src, []byte("x"))
	outside := t.TempDir()
	if err := os.Symlink(outside, filepath.Join(p.ScratchDir(), "link")); err != nil {
		t.Fatal(err)
	}
	for _, dst := range []string{"/etc/x", p.Dir(), p.Dir() + "/../x", filepath.Join(p.ScratchDir(), "link", "x"), "relative"} {
		if err := p.Clone(t.Context(), src, dst); err == nil {
			t.Errorf("Clone to %s succeeded", dst)
		}
	}
	if entries, err := os.ReadDir(outside); err != nil || len(entries) > 0 {
		t.Errorf("a clone went through a symbolic link: %v, %v", entries, err)
	}
}

func TestCloneIsACopyThatChangesAlone(t *testing.T) {
	eachKind(t, func(t *testing.T, p *Pool) {
		src := filepath.Join(p.ScratchDir(), "src")
		data := sparseFile(t, src)
		dst := filepath.Join(create(t, p, "sb-1"), "layer")
		if err := p.Clone(t.Context(), src, dst); err != nil {
			t.Fatal(err)
		}
		if got := readFile(t, dst); !bytes.Equal(got, data) {
			t.Fatal("the clone has other content")
		}
		if info, err := os.Stat(dst); err != nil || info.Mode() != 0o600 {
			t.Errorf("clone: mode %v, %v; want 0600", info.Mode(), err)
		}
		if blocks := allocated(t, dst)[1] * 512; blocks > 4<<20 {
			t.Errorf("the clone of a sparse file has %d bytes on disk", blocks)
		}
		overwrite(t, dst, 1<<20, "changed in the clone")
		overwrite(t, src, 2<<20, "changed in the source")
		if got := readFile(t, src); !bytes.Equal(got[:2<<20], data[:2<<20]) {
			t.Error("a write to the clone changed the source")
		}
		if got := readFile(t, dst); !bytes.Equal(got[2<<20:], data[2<<20:]) {
			t.Error("a write to the source changed the clone")
		}
	})
}

// sparseFile makes a file of 16 MiB with data in its first MiB and a little at 9 MiB, and
// returns its content.
func sparseFile(t *testing.T, path string) []byte {
	t.Helper()
	b := make([]byte, 16<<20)
	for i := range 1 << 20 {
		b[i] = byte(i*7 + i>>8)
	}
	copy(b[9<<20:], "island")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.Write(b[:1<<20])
	if err == nil {
		_, err = f.WriteAt([]byte("island"), 9<<20)
	}
	if err := errors.Join(err, f.Truncate(int64(len(b))), f.Sync(), f.Close()); err != nil {
		t.Fatal(err)
	}
	return b
}

func TestCloneSharesItsBlocks(t *testing.T) {
	p := newPool(t)
	src := filepath.Join(p.ScratchDir(), "src")
	if err := writeSynced(src, bytes.Repeat([]byte("x"), 8<<20)); err != nil {
		t.Fatal(err)
	}
	_, before, err := p.Usage()
	if err != nil {
		t.Fatal(err)
	}
	dir := create(t, p, "sb-1")
	for i := range 20 {
		if err := p.Clone(t.Context(), src, filepath.Join(dir, fmt.Sprint(i))); err != nil {
			t.Fatal(err)
		}
	}
	if _, after, err := p.Usage(); err != nil || after-before > 1<<20 {
		t.Errorf("20 clones of 8 MiB take %d bytes, %v", after-before, err)
	}
}

func TestCloneErrors(t *testing.T) {
	eachKind(t, func(t *testing.T, p *Pool) {
		ctx := t.Context()
		scratch := p.ScratchDir()
		src, taken := filepath.Join(scratch, "src"), filepath.Join(scratch, "taken")
		writeFile(t, src, []byte("source"))
		writeFile(t, taken, []byte("mine"))
		cancelled, cancel := context.WithCancel(ctx)
		cancel()
		for _, tc := range []struct {
			name     string
			ctx      context.Context
			src, dst string
			want     cube.Code
		}{
			{"no source", ctx, src + "x", scratch + "/1", cube.CodeNotFound},
			{"source is a directory", ctx, scratch, scratch + "/2", cube.CodeInvalid},
			{"destination exists", ctx, src, taken, cube.CodeAlreadyExists},
			{"cancelled", cancelled, src, scratch + "/3", cube.CodeCanceled},
		} {
			if err := p.Clone(tc.ctx, tc.src, tc.dst); cube.CodeOf(err) != tc.want || err == nil {
				t.Errorf("%s: %v, want %v", tc.name, err, tc.want)
			}
		}
		if got := readFile(t, taken); string(got) != "mine" {
			t.Errorf("an existing destination was changed to %q", got)
		}
		entries, err := os.ReadDir(scratch)
		if err != nil || len(entries) != 2 {
			t.Errorf("left in scratch: %v, %v", entries, err)
		}
	})
}

func TestFullPoolIsNoSpaceAndHealsWhenFreed(t *testing.T) {
	eachKind(t, func(t *testing.T, p *Pool) {
		src := filepath.Join(p.ScratchDir(), "src")
		writeFile(t, src, bytes.Repeat([]byte("x"), 1<<20))
		ballast := filepath.Join(p.ScratchDir(), "ballast")
		if err := fill(p, ballast); cube.CodeOf(err) != cube.CodeNoSpace {
			t.Fatalf("filling the pool: %v, want NoSpace", err)
		}
		// Small clones may still fit; what matters is how it ends.
		dir := p.SandboxesDir()
		var err error
		for i := 0; err == nil && i < 100_000; i++ {
			err = p.Clone(t.Context(), src, filepath.Join(dir, fmt.Sprint("f", i)))
		}
		if cube.CodeOf(err) != cube.CodeNoSpace {
			t.Errorf("clone on a full pool: %v, want NoSpace", err)
		}
		if got := readFile(t, src); len(got) != 1<<20 {
			t.Errorf("the source has %d bytes", len(got))
		}
		if err := os.Remove(ballast); err != nil {
			t.Fatal(err)
		}
		if err := p.Probe(t.Context()); err != nil {
			t.Errorf("probe after space was freed: %v", err)
		}
	})
}

func TestRemoveNeverEntersAMount(t *testing.T) {
	p := newPool(t)
	host := t.TempDir()
	precious := filepath.Join(host, "precious")
	writeFile(t, precious, []byte("the host's own"))
	for _, from := range []string{host, create(t, p, "sb-other")} { // another file system, and the same one
		dir := create(t, p, "sb-1")
		writeFile(t, filepath.Join(from, "file"), []byte("keep"))
		at := filepath.Join(dir, "a", "mounted")
		if err := os.MkdirAll(at, 0o700); err != nil {
			t.Fatal(err)
		}
		writeFile(t, filepath.Join(dir, "layer"), []byte("x"))
		if err := unix.Mount(from, at, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		if err := p.Remove(t.Context(), "sb-1"); cube.CodeOf(err) != cube.CodeFailedPrecondition {
			t.Errorf("remove with a mount inside: %v, want FailedPrecondition", err)
		}
		if got := readFile(t, filepath.Join(from, "file")); string(got) != "keep" {
			t.Errorf("file behind the mount: %q", got)
		}
		if pathExists(filepath.Join(dir, "layer")) {
			t.Error("the rest of the directory was not removed")
		}
		if err := unix.Unmount(at, 0); err != nil {
			t.Fatal(err)
		}
		if err := p.Remove(t.Context(), "sb-1"); err != nil {
			t.Errorf("remove after the unmount: %v", err)
		}
	}
	if got := readFile(t, precious); string(got) != "the host's own" {
		t.Errorf("the host's file: %q", got)
	}
}

func TestRemoveKeepsWhatIsMountedOnAFile(t *testing.T) {
	p := newPool(t)
	host := filepath.Join(t.TempDir(), "file")
	writeFile(t, host, []byte("the host's own"))
	at := filepath.Join(create(t, p, "sb-1"), "layer")
	writeFile(t, at, nil)
	if err := unix.Mount(host, at, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	if err := p.Remove(t.Context(), "sb-1"); cube.CodeOf(err) != cube.CodeFailedPrecondition {
		t.Errorf("remove with a mounted file: %v, want FailedPrecondition", err)
	}
	if err := unix.Unmount(at, 0); err != nil {
		t.Fatal(err)
	}
	if err := p.Remove(t.Context(), "sb-1"); err != nil {
		t.Error(err)
	}
	if got := readFile(t, host); string(got) != "the host's own" {
		t.Errorf("the host's file: %q", got)
	}
}

func TestRemoveFollowsNoLinkAndReachesEveryDepth(t *testing.T) {
	eachKind(t, func(t *testing.T, p *Pool) {
		outside := t.TempDir()
		writeFile(t, filepath.Join(outside, "file"), []byte("keep"))
		dir := create(t, p, "sb-1")
		for name, to := range map[string]string{"dir": outside, "file": outside + "/file", "gone": "/nowhere", "up": ".."} {
			if err := os.Symlink(to, filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
		deepTree(t, dir, 3*maxDepth)
		for i := range 500 {
			writeFile(t, filepath.Join(dir, fmt.Sprint("many", i)), nil)
		}
		if err := unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := p.Remove(t.Context(), "sb-1"); err != nil {
			t.Fatal(err)
		}
		if pathExists(dir) {
			t.Error("the directory is still there")
		}
		if got := readFile(t, filepath.Join(outside, "file")); string(got) != "keep" {
			t.Errorf("file behind a link: %q", got)
		}
	})
}

// deepTree makes two chains of directories with a file at each level.
func deepTree(t *testing.T, dir string, depth int) {
	t.Helper()
	for _, chain := range []string{"x", "y"} {
		at := dir
		for range depth {
			at = filepath.Join(at, chain)
			if err := os.Mkdir(at, 0o700); err != nil {
				t.Fatal(err)
			}
			writeFile(t, filepath.Join(at, "f"), nil)
		}
	}
}

func TestRemoveOfALinkRemovesTheLink(t *testing.T) {
	p := plainPool(t)
	outside := t.TempDir()
	writeFile(t, filepath.Join(outside, "file"), nil)
	if err := os.Symlink(outside, filepath.Join(p.SandboxesDir(), "sb-1")); err != nil {
		t.Fatal(err)
	}
	if err := p.Remove(t.Context(), "sb-1"); err != nil {
		t.Fatal(err)
	}
	if !pathExists(filepath.Join(outside, "file")) {
		t.Error("removed what the link points to")
	}
}

func TestProbeLeavesNothing(t *testing.T) {
	eachKind(t, func(t *testing.T, p *Pool) {
		for range 3 {
			if err := p.Probe(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if entries, err := os.ReadDir(p.ScratchDir()); err != nil || len(entries) > 0 {
			t.Errorf("left in scratch: %v, %v", entries, err)
		}
	})
}
