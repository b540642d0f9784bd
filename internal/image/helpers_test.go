package image_test

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cubelet/internal/image"
	"github.com/cubesandbox/cubelet/internal/testenv"
	"github.com/cubesandbox/cubelet/internal/tplimage"
)

// when is the modification time of entries that name none.
var when = time.Unix(1_600_000_000, 123456789)

// entry is one entry of a layer.
type entry struct {
	tar.Header
	data string
}

func file(name, data string) entry {
	return entry{tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644}, data}
}

func folder(name string) entry {
	return entry{Header: tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: 0o755}}
}

func symlink(name, target string) entry {
	return entry{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777}}
}

func hardlink(name, target string) entry {
	return entry{Header: tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: target, Mode: 0o644}}
}

func (e entry) with(change func(h *tar.Header)) entry {
	change(&e.Header)
	return e
}

func layer(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := e.Header
		h.Size = int64(len(e.data))
		h.Format = tar.FormatPAX
		if h.ModTime.IsZero() {
			h.ModTime = when
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func gz(b []byte) []byte {
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	w.Write(b)
	w.Close()
	return out.Bytes()
}

func zst(b []byte) []byte {
	w, err := zstd.NewWriter(nil)
	if err != nil {
		panic(err)
	}
	return w.EncodeAll(b, nil)
}

// blobs is an image's content before it is packed.
type blobs map[digest.Digest][]byte

func (b blobs) add(mediaType string, content []byte) ocispec.Descriptor {
	d := digest.FromBytes(content)
	b[d] = content
	return ocispec.Descriptor{MediaType: mediaType, Digest: d, Size: int64(len(content))}
}

func (b blobs) addJSON(mediaType string, v any) ocispec.Descriptor {
	content, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b.add(mediaType, content)
}

// testImage is an image to pack. Change, when set, spoils its manifest or configuration.
type testImage struct {
	layers   [][]byte // tar
	pack     func([]byte) []byte
	platform ocispec.Platform
	config   ocispec.ImageConfig
	change   func(m *ocispec.Manifest, c *ocispec.Image)
}

func linuxAMD64() ocispec.Platform { return ocispec.Platform{OS: "linux", Architecture: "amd64"} }

// addTo adds the image's blobs and returns its manifest's descriptor.
func (i testImage) addTo(b blobs) ocispec.Descriptor {
	if i.pack == nil {
		i.pack = gz
	}
	if i.platform.OS == "" {
		i.platform = linuxAMD64()
	}
	config := ocispec.Image{Platform: i.platform, Config: i.config, RootFS: ocispec.RootFS{Type: "layers"}}
	m := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest, Layers: []ocispec.Descriptor{}}
	for _, l := range i.layers {
		config.RootFS.DiffIDs = append(config.RootFS.DiffIDs, digest.FromBytes(l))
		m.Layers = append(m.Layers, b.add(ocispec.MediaTypeImageLayerGzip, i.pack(l)))
	}
	if i.change != nil {
		i.change(&m, &config)
	}
	m.Config = b.addJSON(ocispec.MediaTypeImageConfig, config)
	if i.change != nil {
		i.change(&m, &config)
	}
	return b.addJSON(ocispec.MediaTypeImageManifest, m)
}

func index(entries ...ocispec.Descriptor) ocispec.Index {
	return ocispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex, Manifests: entries}
}

// layoutTar packs blobs as an OCI layout.
func layoutTar(t testing.TB, b blobs, entries ...ocispec.Descriptor) []byte {
	t.Helper()
	idx, err := json.Marshal(index(entries...))
	if err != nil {
		t.Fatal(err)
	}
	files := []entry{file("oci-layout", `{"imageLayoutVersion":"1.0.0"}`), file("index.json", string(idx))}
	for _, d := range slices.Sorted(maps.Keys(b)) {
		files = append(files, file("blobs/"+d.Algorithm().String()+"/"+d.Encoded(), string(b[d])))
	}
	return layer(t, files...)
}

func (i testImage) tar(t testing.TB) []byte {
	t.Helper()
	b := blobs{}
	m := i.addTo(b)
	return layoutTar(t, b, m)
}

func write(t testing.TB, content []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image.tar")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// newStore returns a store whose scratch directory must be empty at the end.
func newStore(t testing.TB, c image.Config) *image.Store {
	t.Helper()
	c.ScratchDir = t.TempDir()
	t.Cleanup(func() {
		if left, err := os.ReadDir(c.ScratchDir); err != nil || len(left) > 0 {
			t.Errorf("left in the scratch directory: %v, %v", left, err)
		}
	})
	s, err := image.New(c)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// build writes the root disk of an archive; after an error there must be no file.
func build(t testing.TB, s *image.Store, archive []byte) (string, tplimage.Root, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "root.erofs")
	root, err := s.Build(context.Background(), tplimage.Source{ArchivePath: write(t, archive)}, path, nil)
	if err != nil {
		if _, statErr := os.Lstat(path); statErr == nil {
			t.Errorf("there is a root disk after %v", err)
		}
	}
	return path, root, err
}

// mount mounts a root disk after fsck.erofs had nothing to say.
func mount(t testing.TB, disk string) string {
	t.Helper()
	testenv.RequireRoot(t)
	if out, err := exec.Command("fsck.erofs", disk).CombinedOutput(); err != nil {
		t.Fatalf("fsck.erofs: %v\n%s", err, out)
	}
	mnt := t.TempDir()
	if out, err := exec.Command("mount", "-t", "erofs", "-o", "ro,loop", disk, mnt).CombinedOutput(); err != nil {
		t.Fatalf("mount: %v\n%s", err, out)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(mnt, 0); err != nil {
			t.Errorf("unmount %s: %v", mnt, err)
		}
	})
	return mnt
}

// describe renders every file below dir, one a line, by everything that an image can say
// about it. Hard links show the first of their names.
func describe(t testing.TB, dir string, dirTimes bool) map[string]string {
	t.Helper()
	all := map[string]string{}
	first := map[uint64]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		name, _ := filepath.Rel(dir, path)
		text := fmt.Sprintf("%o %d:%d", st.Mode, st.Uid, st.Gid)
		if !d.IsDir() || dirTimes {
			text += fmt.Sprintf(" %d.%d", st.Mtim.Sec, st.Mtim.Nsec)
		}
		switch {
		case d.IsDir():
		case st.Nlink > 1 && first[st.Ino] != "":
			text += " = " + first[st.Ino]
		default:
			first[st.Ino] = name
			text += fmt.Sprintf(" links=%d size=%d dev=%d", st.Nlink, st.Size, st.Rdev)
		}
		content, err := contentOf(path, d)
		all[name] = text + content + xattrsOf(t, path)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func contentOf(path string, d fs.DirEntry) (string, error) {
	switch {
	case d.Type()&fs.ModeSymlink != 0:
		target, err := os.Readlink(path)
		return " -> " + target, err
	case d.Type().IsRegular():
		b, err := os.ReadFile(path)
		return " " + digest.FromBytes(b).Encoded()[:12], err
	}
	return "", nil
}

func xattrsOf(t testing.TB, path string) string {
	t.Helper()
	list := make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, list)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for name := range strings.SplitSeq(strings.TrimRight(string(list[:n]), "\x00"), "\x00") {
		if name == "" {
			continue
		}
		value := make([]byte, 64<<10)
		n, err := unix.Lgetxattr(path, name, value)
		if err != nil {
			t.Fatalf("%s: %s: %v", path, name, err)
		}
		out = append(out, fmt.Sprintf(" %s=%x", name, value[:n]))
	}
	slices.Sort(out)
	return strings.Join(out, "")
}

func diff(t testing.TB, got, want map[string]string) {
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if got[name] != want[name] {
			t.Errorf("%.100s\n got %s\nwant %s", name, got[name], want[name])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(got)) {
		if _, ok := want[name]; !ok {
			t.Errorf("%.100s should not be there: %s", name, got[name])
		}
	}
}

func run(t testing.TB, name string, args ...string) []byte {
	t.Helper()
	out, err := exec.Command(name, args...).Output()
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return out
}

func decode[T any](b []byte) (T, error) {
	var v T
	err := json.Unmarshal(b, &v)
	return v, err
}

func devRandom(t testing.TB) io.Reader {
	t.Helper()
	f, err := os.Open("/dev/urandom")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// layersOf returns the layers of an OCI layout's one image as tar streams.
func layersOf(t testing.TB, archive []byte) (layers [][]byte) {
	t.Helper()
	files := map[string][]byte{}
	r := tar.NewReader(bytes.NewReader(archive))
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if files[h.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
	blob := func(d digest.Digest) []byte { return files["blobs/sha256/"+d.Encoded()] }
	idx, err := decode[ocispec.Index](files["index.json"])
	if err != nil {
		t.Fatal(err)
	}
	m, err := decode[ocispec.Manifest](blob(idx.Manifests[0].Digest))
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range m.Layers {
		z, err := gzip.NewReader(bytes.NewReader(blob(l.Digest)))
		if err != nil {
			t.Fatal(err)
		}
		plain, err := io.ReadAll(z)
		if err != nil {
			t.Fatal(err)
		}
		layers = append(layers, plain)
	}
	return layers
}
