package image_test

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	containerdarchive "github.com/containerd/containerd/v2/pkg/archive"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cubelet/internal/image"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

// unpack applies layers with containerd's own code, which serves as the oracle.
func unpack(t testing.TB, layers ...[]byte) (string, error) {
	t.Helper()
	testenv.RequireRoot(t)
	dir := filepath.Join(t.TempDir(), "oracle")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for i, l := range layers {
		if _, err := containerdarchive.Apply(context.Background(), dir, bytes.NewReader(l)); err != nil {
			return "", fmt.Errorf("layer %d: %w", i+1, err)
		}
	}
	return dir, nil
}

func xattr(name, value string) func(*tar.Header) {
	return func(h *tar.Header) { h.PAXRecords = map[string]string{"SCHILY.xattr." + name: value} }
}

// everything is an image with at least one of each kind of thing, all parents given.
func everything(t testing.TB) [][]byte {
	t.Helper()
	capability := string([]byte{1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	acl := "\x02\x00\x00\x00\x01\x00\x06\x00\xff\xff\xff\xff\x04\x00\x04\x00\xff\xff\xff\xff\x20\x00\x04\x00\xff\xff\xff\xff"
	deep := strings.Repeat("d/", 60) + "bottom"
	long := strings.Repeat("n", 255)
	device := func(kind byte, major, minor int64) entry {
		return entry{Header: tar.Header{Typeflag: kind, Name: fmt.Sprintf("dev/%c%d-%d", kind, major, minor), Mode: 0o660, Gid: 6, Devmajor: major, Devminor: minor}}
	}
	first := []entry{
		folder("."), folder("dev"), device(tar.TypeChar, 1, 3), device(tar.TypeBlock, 259, 70000),
		{Header: tar.Header{Typeflag: tar.TypeFifo, Name: "dev/fifo", Mode: 0o600}},
		folder("bin"),
		file("bin/sudo", "set uid").with(func(h *tar.Header) { h.Mode = 0o4755 }),
		file("bin/wall", "set gid").with(func(h *tar.Header) { h.Mode = 0o2711; h.Gid = 5 }),
		file("bin/ping", "capable").with(xattr("security.capability", capability)),
		hardlink("bin/ping6", "bin/ping").with(xattr("security.capability", capability)),
		hardlink("bin/ping4", "/bin/ping6").with(xattr("security.capability", capability)),
		folder("tmp").with(func(h *tar.Header) { h.Mode = 0o1777 }),
		folder("acl").with(xattr("system.posix_acl_access", acl)),
		file("acl/user", "attributes").with(func(h *tar.Header) {
			h.PAXRecords = map[string]string{"SCHILY.xattr.user.one": "1", "SCHILY.xattr.user.empty": "", "SCHILY.xattr.user.long": strings.Repeat("v", 3000)}
		}),
		folder("empty"), folder("own").with(func(h *tar.Header) { h.Uid, h.Gid, h.Mode = 4_000_000_000, 1234, 0o700 }),
		file("own/file", "").with(func(h *tar.Header) { h.Uid, h.Gid, h.Mode = 1000, 70000, 0 }),
		symlink("sym", "/absolute/../target"), symlink("dangling", "../../../../nowhere"),
		symlink("longlink", strings.Repeat("x/", 1500)),
		file("big", strings.Repeat("0123456789abcdef", 300_000)),
		file("sparse", "start"+strings.Repeat("\x00", 5<<20)+"end"),
		file(long, "long name"),
		folder("lower"), file("lower/gone", "hidden by a whiteout"), file("lower/kept", "stays"), file("lower/replaced", "old"),
		folder("opaque"), file("opaque/old", "hidden"), folder("opaque/sub"), file("opaque/sub/deep", "hidden"),
		folder("becomes-file"), file("becomes-file/x", ""), file("becomes-dir", ""), folder("whole"), file("whole/x", ""),
		folder("usr"), folder("usr/lib"), symlink("lib", "usr/lib"),
	}
	for i := range 60 {
		first = append(first, folder(deep[:2*i+1]))
	}
	first = append(first, file(deep, "deep"))
	second := []entry{
		file("lower/.wh.gone", ""), file("lower/replaced", "new"), file("opaque/new", "first"),
		file("opaque/.wh..wh..opq", ""), file(".wh.whole", ""), file("becomes-file", "now a file"),
		folder("becomes-dir"), file("becomes-dir/x", "in it"), file("lib/through-link", "lands in usr/lib"),
		folder("acl").with(func(h *tar.Header) { h.Mode = 0o711 }),
		hardlink("lower/again", "lower/kept"), file("lower/.wh.missing", ""), file("none/.wh.missing", ""),
	}
	// Directories that later entries changed keep the times of their own entries.
	third := []entry{folder("lower"), folder("opaque"), folder("usr/lib"), folder("."), folder("none")}
	return [][]byte{layer(t, first...), layer(t, second...), layer(t, third...)}
}

func TestTheRootDiskEqualsWhatContainerdUnpacks(t *testing.T) {
	layers := everything(t)
	for _, pack := range []struct {
		name string
		pack func([]byte) []byte
	}{{"gzip", gz}, {"zstd", zst}, {"plain", bytes.Clone}} {
		t.Run(pack.name, func(t *testing.T) {
			disk, _, err := build(t, newStore(t, image.Config{}), testImage{layers: layers, pack: pack.pack}.tar(t))
			if err != nil {
				t.Fatal(err)
			}
			want, err := unpack(t, layers...)
			if err != nil {
				t.Fatal(err)
			}
			got, all := describe(t, mount(t, disk), true), describe(t, want, true)
			all["."] = got["."] // containerd leaves the times of the root alone
			diff(t, got, all)
		})
	}
}

func TestRandomLayersEqualWhatContainerdUnpacks(t *testing.T) {
	for seed := range uint64(30) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 1))
			var layers [][]byte
			for range 1 + r.IntN(5) {
				layers = append(layers, randomLayer(t, r))
			}
			disk, _, err := build(t, newStore(t, image.Config{}), testImage{layers: layers}.tar(t))
			want, oracleErr := unpack(t, layers...)
			if err != nil || oracleErr != nil {
				if (err == nil) != (oracleErr == nil) {
					t.Errorf("got %v, containerd %v", err, oracleErr)
				}
				return
			}
			diff(t, describe(t, mount(t, disk), false), describe(t, want, false))
		})
	}
}

// randomLayer makes a layer of few names, so that layers meet each other. No layer says
// two things about one name: there containerd and the specification differ.
func randomLayer(t testing.TB, r *rand.Rand) []byte {
	t.Helper()
	var entries []entry
	used := map[string]bool{} // whether the name is closed: nothing may be below it
	for range r.IntN(20) {
		name := randomName(r)
		if meets(used, name) {
			continue
		}
		dir, base := filepath.Split(name)
		kind := r.IntN(6)
		used[name] = kind != 1
		switch kind {
		case 0:
			entries = append(entries, file(dir+".wh."+base, ""))
		case 1:
			entries = append(entries, folder(name))
		case 2:
			entries = append(entries, folder(name), file(name+"/.wh..wh..opq", ""), file(name+"/new", "new"))
		default:
			entries = append(entries, file(name, strings.Repeat(fmt.Sprint(r.IntN(1000)), r.IntN(3000))))
		}
	}
	for i := range r.IntN(3) {
		name := fmt.Sprintf("h%d", i)
		entries = append(entries, file(name, name), hardlink(name+"l", name))
	}
	return layer(t, entries...)
}

// meets reports whether the name is used, or above a used one, or below a closed one.
func meets(used map[string]bool, name string) bool {
	for other, closed := range used {
		if other == name || strings.HasPrefix(other, name+"/") || closed && strings.HasPrefix(name, other+"/") {
			return true
		}
	}
	return false
}

func randomName(r *rand.Rand) string {
	parts := make([]string, 1+r.IntN(3))
	for i := range parts {
		parts[i] = string(rune('a' + 4*i + r.IntN(4)))
	}
	return strings.Join(parts, "/")
}

func TestAWhiteoutSparesWhatItsOwnLayerBrings(t *testing.T) {
	lower := layer(t, folder("dir"), file("dir/old", ""), file("x", "old"))
	upper := layer(t, file("dir/new", ""), file("x", "new"), file(".wh.dir", ""), file(".wh.x", ""))
	disk, _, err := build(t, newStore(t, image.Config{}), testImage{layers: [][]byte{lower, upper}}.tar(t))
	if err != nil {
		t.Fatal(err)
	}
	mnt := mount(t, disk)
	if b, err := os.ReadFile(filepath.Join(mnt, "x")); err != nil || string(b) != "new" {
		t.Errorf("x: %q, %v", b, err)
	}
	if _, err := os.Lstat(filepath.Join(mnt, "dir/new")); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(filepath.Join(mnt, "dir/old")); err == nil {
		t.Error("dir/old is visible")
	}
}

func TestNamesNeverLeaveTheImage(t *testing.T) {
	layers := layer(t, symlink("etc", "/"), symlink("up", "../../.."), symlink("loop/a", "b"),
		file("etc/through-root", "1"), file("up/through-parents", "2"), file("/absolute", "3"), file("./dot", "4"))
	disk, _, err := build(t, newStore(t, image.Config{}), testImage{layers: [][]byte{layers}}.tar(t))
	if err != nil {
		t.Fatal(err)
	}
	mnt := mount(t, disk)
	for _, name := range []string{"through-root", "through-parents", "absolute", "dot"} {
		if _, err := os.Lstat(filepath.Join(mnt, name)); err != nil {
			t.Error(err)
		}
	}
}

func TestOverlayAttributesOfTheImageDoNotReachTheGuest(t *testing.T) {
	l := layer(t, folder("d").with(xattr("trusted.overlay.opaque", "y")), file("f", "").with(xattr("user.overlay.metacopy", "")),
		file("g", "").with(xattr("com.apple.quarantine", "x")))
	disk, _, err := build(t, newStore(t, image.Config{}), testImage{layers: [][]byte{l}}.tar(t))
	if err != nil {
		t.Fatal(err)
	}
	mnt := mount(t, disk)
	for _, name := range []string{"d", "f", "g"} {
		if x := xattrsOf(t, filepath.Join(mnt, name)); x != "" {
			t.Errorf("%s has %s", name, x)
		}
	}
}

func TestAnImageWithoutLayersHasAnEmptyRoot(t *testing.T) {
	disk, root, err := build(t, newStore(t, image.Config{}), testImage{}.tar(t))
	if err != nil {
		t.Fatal(err)
	}
	if root.Bytes == 0 || root.Platform != "linux/amd64" || !strings.HasPrefix(root.Digest, "sha256:") {
		t.Errorf("got %+v", root)
	}
	if entries, err := os.ReadDir(mount(t, disk)); err != nil || len(entries) != 0 {
		t.Errorf("%v, %v", entries, err)
	}
}

func TestASparseFileTakesNoSpace(t *testing.T) {
	// An archive as GNU tar makes it: 40 MiB that are told by a map of one block.
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, "sparse"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("data"), 20<<20); err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(40 << 20); err != nil {
		t.Fatal(err)
	}
	f.Close()
	for _, format := range []string{"gnu", "posix"} {
		l := run(t, "tar", "--sparse", "--format="+format, "-C", dir, "-cf", "-", "sparse")
		disk, _, err := build(t, newStore(t, image.Config{}), testImage{layers: [][]byte{l}}.tar(t))
		if err != nil {
			t.Fatal(err)
		}
		var st unix.Stat_t
		if err := unix.Stat(disk, &st); err != nil || st.Blocks > 200 {
			t.Errorf("%s: the root disk takes %d KiB, %v", format, st.Blocks/2, err)
		}
		got, err := os.ReadFile(filepath.Join(mount(t, disk), "sparse"))
		want, _ := os.ReadFile(filepath.Join(dir, "sparse"))
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: the content differs, %v", format, err)
		}
	}
}

func TestTheBaseImageEqualsWhatContainerdUnpacks(t *testing.T) {
	b, err := os.ReadFile(testenv.BaseArchive(t))
	if err != nil {
		t.Fatal(err)
	}
	layers := layersOf(t, b)
	disk, _, err := build(t, newStore(t, image.Config{}), b)
	if err != nil {
		t.Fatal(err)
	}
	want, err := unpack(t, layers...)
	if err != nil {
		t.Fatal(err)
	}
	got, all := describe(t, mount(t, disk), true), describe(t, want, true)
	got["."], all["."] = "", "" // containerd leaves the times of the root alone
	diff(t, got, all)
}
