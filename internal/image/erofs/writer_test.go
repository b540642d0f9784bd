package erofs_test

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cubelet/internal/image/erofs"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

func dir(children map[string]*erofs.Inode) *erofs.Inode {
	return &erofs.Inode{Mode: erofs.ModeDir | 0o755, MTime: 1000, Children: children}
}

// image is an image in the making.
type image struct {
	*erofs.Writer
	t    *testing.T
	path string
}

func newImage(t *testing.T) image {
	t.Helper()
	open := func(name string) *os.File {
		f, err := os.Create(filepath.Join(t.TempDir(), name))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	f := open("image")
	return image{erofs.NewWriter(erofs.Options{File: f, Spool: open("spool")}), t, f.Name()}
}

func (m image) file(content []byte, xattrs map[string]string) *erofs.Inode {
	m.t.Helper()
	data, err := m.Add(bytes.NewReader(content), int64(len(content)), xattrs)
	if err != nil {
		m.t.Fatal(err)
	}
	return &erofs.Inode{Mode: erofs.ModeRegular | 0o640, Data: data, Xattrs: xattrs}
}

// mount finishes the image, has it checked by fsck.erofs and mounts it.
func (m image) mount(root *erofs.Inode) string {
	m.t.Helper()
	testenv.RequireRoot(m.t)
	if _, err := m.Finish(root, erofs.Super{BuildTime: 12345}); err != nil {
		m.t.Fatal(err)
	}
	if out, err := exec.Command("fsck.erofs", m.path).CombinedOutput(); err != nil {
		m.t.Fatalf("fsck.erofs: %v\n%s", err, out)
	}
	mnt := m.t.TempDir()
	if out, err := exec.Command("mount", "-t", "erofs", "-o", "ro,loop", m.path, mnt).CombinedOutput(); err != nil {
		m.t.Fatalf("mount: %v\n%s", err, out)
	}
	m.t.Cleanup(func() {
		if err := syscall.Unmount(mnt, 0); err != nil {
			m.t.Errorf("unmount %s: %v", mnt, err)
		}
	})
	return mnt
}

func random(t *testing.T, n int) []byte {
	t.Helper()
	b := make([]byte, n)
	rand.Read(b)
	return b
}

func TestFilesOfEverySizeReadBackAsWritten(t *testing.T) {
	m := newImage(t)
	want := map[string][]byte{}
	root := dir(map[string]*erofs.Inode{})
	for _, size := range []int{0, 1, 63, 2047, 2048, 2049, 4095, 4096, 4097, 6144, 6145, 8192, 1 << 20, 1<<20 + 1, 3<<20 + 777} {
		for _, xattrs := range []map[string]string{nil, {"user.a": strings.Repeat("x", 1970)}, {"user.b": strings.Repeat("y", 9000)}} {
			name := fmt.Sprintf("f%d-%d", size, len(xattrs["user.a"])+len(xattrs["user.b"]))
			want[name] = random(t, size)
			root.Children[name] = m.file(want[name], xattrs)
		}
	}
	mnt := m.mount(root)
	for name, content := range want {
		got, err := os.ReadFile(filepath.Join(mnt, name))
		if err != nil || !bytes.Equal(got, content) {
			t.Errorf("%s: %v, %d bytes", name, err, len(got))
		}
		var b [10000]byte
		for attr, value := range root.Children[name].Xattrs {
			n, err := unix.Lgetxattr(filepath.Join(mnt, name), attr, b[:])
			if err != nil || string(b[:n]) != value {
				t.Errorf("%s: %s: %v, %d bytes", name, attr, err, n)
			}
		}
	}
}

func TestDirectoriesOfEverySizeListAllTheirNames(t *testing.T) {
	m := newImage(t)
	empty := m.file(nil, nil)
	root := dir(map[string]*erofs.Inode{})
	for _, count := range []int{0, 1, 2, 14, 15, 16, 100, 127, 128, 5000} {
		for _, length := range []int{10, 255} {
			d := dir(map[string]*erofs.Inode{})
			for i := range count {
				name := fmt.Sprintf("%0*d", length, i)
				d.Children[name] = empty
			}
			d.Children["!first"], d.Children["zlast"] = empty, dir(nil)
			root.Children[fmt.Sprintf("d%d-%d", count, length)] = d
		}
	}
	mnt := m.mount(root)
	for name, d := range root.Children {
		entries, err := os.ReadDir(filepath.Join(mnt, name))
		if err != nil || len(entries) != len(d.Children) {
			t.Errorf("%s: %v, %d names instead of %d", name, err, len(entries), len(d.Children))
		}
		for child := range d.Children {
			if _, err := os.Lstat(filepath.Join(mnt, name, child)); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestLinksOfEveryLengthAndDevices(t *testing.T) {
	m := newImage(t)
	root := dir(map[string]*erofs.Inode{})
	for _, n := range []int{1, 59, 60, 2000, 2048, 2049, 4000, 4095} {
		root.Children[fmt.Sprintf("l%d", n)] = &erofs.Inode{Mode: erofs.ModeSymlink | 0o777, Target: strings.Repeat("t", n)}
		root.Children[fmt.Sprintf("x%d", n)] = &erofs.Inode{
			Mode: erofs.ModeSymlink | 0o777, Target: strings.Repeat("t", n),
			Xattrs: map[string]string{"trusted.x": strings.Repeat("v", 2500)},
		}
	}
	dev, err := erofs.Device(259, 70000)
	if err != nil {
		t.Fatal(err)
	}
	root.Children["dev"] = &erofs.Inode{Mode: erofs.ModeBlock | 0o600, Rdev: dev}
	mnt := m.mount(root)
	for name, n := range root.Children {
		if n.Mode&erofs.ModeType != erofs.ModeSymlink {
			continue
		}
		if got, err := os.Readlink(filepath.Join(mnt, name)); err != nil || got != n.Target {
			t.Errorf("%s: %v, %d bytes", name, err, len(got))
		}
	}
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join(mnt, "dev"), &st); err != nil || unix.Major(st.Rdev) != 259 || unix.Minor(st.Rdev) != 70000 {
		t.Errorf("dev: %v, %d:%d", err, unix.Major(st.Rdev), unix.Minor(st.Rdev))
	}
}

func TestZerosTakeNoSpaceAndFreedContentsGiveItBack(t *testing.T) {
	m := newImage(t)
	root := dir(map[string]*erofs.Inode{})
	sparse := make([]byte, 64<<20)
	copy(sparse[32<<20:], "in the middle")
	root.Children["sparse"] = m.file(sparse, nil)
	freed := m.file(random(t, 8<<20), nil)
	kept := random(t, 10000)
	root.Children["kept"] = m.file(kept, nil)
	if err := m.Free(freed.Data); err != nil {
		t.Fatal(err)
	}
	mnt := m.mount(root)
	var st syscall.Stat_t
	if err := syscall.Stat(m.path, &st); err != nil || st.Blocks*512 > 256<<10 {
		t.Errorf("%v: the image takes %d KiB on disk", err, st.Blocks/2)
	}
	if got, err := os.ReadFile(filepath.Join(mnt, "sparse")); err != nil || !bytes.Equal(got, sparse) {
		t.Errorf("sparse: %v", err)
	}
	if got, err := os.ReadFile(filepath.Join(mnt, "kept")); err != nil || !bytes.Equal(got, kept) {
		t.Errorf("kept: %v", err)
	}
}

func TestTheSameTreeGivesTheSameBytes(t *testing.T) {
	content := random(t, 10000)
	build := func() []byte {
		m := newImage(t)
		d := map[string]*erofs.Inode{}
		for i := range 100 {
			d[fmt.Sprint(i)] = m.file(content[i:], map[string]string{"user.a": "1", "user.b": "2", "security.c": "3"})
		}
		if _, err := m.Finish(dir(d), erofs.Super{UUID: [16]byte{1, 2}}); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(m.path)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	if !bytes.Equal(build(), build()) {
		t.Error("two builds differ")
	}
}

func TestShortContentsAreTheSourcesFault(t *testing.T) {
	m := newImage(t)
	_, err := m.Add(strings.NewReader("abc"), 4, nil)
	var source *erofs.SourceError
	if !errors.As(err, &source) || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got %v", err)
	}
}
