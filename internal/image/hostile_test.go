package image_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/image"
	"github.com/cubesandbox/cubelet/internal/testenv"
	"github.com/cubesandbox/cubelet/internal/tplimage"
)

// wantError checks the code and that the text names what is wrong.
func wantError(t *testing.T, err error, code cube.Code, words ...string) {
	t.Helper()
	if err == nil || cube.CodeOf(err) != code {
		t.Fatalf("got %v (%s), want %s", err, cube.CodeOf(err), code)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q does not say %q", err, w)
		}
	}
}

func TestHostileEntriesAreRefused(t *testing.T) {
	long := strings.Repeat("n", 256)
	for name, c := range map[string]struct {
		entries []entry
		words   string
	}{
		"parent in the name":       {[]entry{file("../escape", "")}, ".."},
		"parent inside the name":   {[]entry{file("a/../../escape", "")}, ".."},
		"hard link to the outside": {[]entry{hardlink("passwd", "../../etc/passwd")}, ".."},
		"hard link to nothing":     {[]entry{hardlink("a", "/etc/passwd")}, "does not exist"},
		"hard link to a directory": {[]entry{folder("d"), hardlink("a", "d")}, "directory"},
		"hard link to the root":    {[]entry{hardlink("a", "/")}, "does not exist"},
		"file through a file":      {[]entry{file("f", ""), file("f/x", "")}, "is a file"},
		"root as a file":           {[]entry{file(".", "")}, "root"},
		"symlink loop":             {[]entry{symlink("a", "b"), symlink("b", "a"), file("a/x", "")}, "too many symbolic links"},
		"symlink bomb":             {bomb(), "symbolic links"},
		"long name":                {[]entry{file(long, "")}, "256 bytes"},
		"long path":                {[]entry{file(strings.Repeat("d/", 2100)+"x", "")}, "4201 bytes"},
		"long directory by link":   {[]entry{symlink("l", long+"/x"), file("l/x", "")}, "256 bytes"},
		"long symlink":             {[]entry{symlink("l", strings.Repeat("t", 4096))}, "4096 bytes"},
		"empty symlink":            {[]entry{symlink("l", "")}, "nothing"},
		"whiteout of nothing":      {[]entry{file(".wh.", "")}, "names nothing"},
		"whiteout of the parent":   {[]entry{file("d/.wh...", "")}, "names nothing"},
		"whiteout of the dir":      {[]entry{file("d/.wh..", "")}, "names nothing"},
		"owner out of range":       {[]entry{file("f", "").with(func(h *tar.Header) { h.Uid = 1 << 33 })}, "owner"},
		"device out of range":      {[]entry{file("f", "").with(func(h *tar.Header) { h.Typeflag = tar.TypeChar; h.Devmajor = 5000 })}, "5000"},
		"huge attribute":           {[]entry{file("f", "").with(xattr("user.x", strings.Repeat("x", 70000)))}, "65535"},
		"unknown type":             {[]entry{file("f", "").with(func(h *tar.Header) { h.Typeflag = 'Z' })}, "unknown type"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := build(t, newStore(t, image.Config{}), testImage{layers: [][]byte{layer(t, c.entries...)}}.tar(t))
			wantError(t, err, cube.CodeInvalid, c.words, "layer 1 of 1")
		})
	}
}

// bomb is a chain of links each of which doubles the path.
func bomb() []entry {
	entries := []entry{symlink("l0", ".")}
	for i := 1; i < 20; i++ {
		entries = append(entries, symlink(fmt.Sprint("l", i), fmt.Sprintf("l%d/l%d", i-1, i-1)))
	}
	return append(entries, file("l19/x", ""))
}

func TestDeepDirectoriesByLinksAreRefused(t *testing.T) {
	var entries []entry
	step := strings.Repeat("d/", 200)
	at := ""
	for i := range 15 {
		entries = append(entries, file(at+step+"f", ""), symlink(fmt.Sprint("l", i), at+step))
		at = fmt.Sprintf("l%d/", i)
	}
	_, _, err := build(t, newStore(t, image.Config{}), testImage{layers: [][]byte{layer(t, entries...)}}.tar(t))
	wantError(t, err, cube.CodeInvalid, "deep")
}

func TestImagesAreBounded(t *testing.T) {
	many := make([]entry, 101)
	for i := range many {
		many[i] = file(fmt.Sprint(i), "")
	}
	zeros := layer(t, file("zeros", strings.Repeat("\x00", 2<<20)))
	sparse := sparseBomb(1 << 40)
	for name, c := range map[string]struct {
		limits image.Limits
		layer  []byte
		words  string
	}{
		"files":        {image.Limits{Entries: 100}, layer(t, many...), "100 files"},
		"bytes":        {image.Limits{Bytes: 1 << 20}, zeros, "1048576 bytes"},
		"sparse bytes": {image.Limits{Bytes: 1 << 30}, sparse, "1073741824 bytes"},
		"metadata":     {image.Limits{MetadataBytes: 20000}, layer(t, many...), "20000 bytes"},
		// What follows the archive's end is unpacked for its digest only.
		"trailing bytes": {image.Limits{Bytes: 1}, append(layer(t), make([]byte, 100<<20)...), "unpacks to more"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := build(t, newStore(t, image.Config{Limits: c.limits}), testImage{layers: [][]byte{c.layer}}.tar(t))
			wantError(t, err, cube.CodeInvalid, c.words)
		})
	}
	t.Run("archive", func(t *testing.T) {
		bomb := gz(layer(t, file("blob", strings.Repeat("\x00", 100<<20))))
		_, _, err := build(t, newStore(t, image.Config{Limits: image.Limits{Bytes: 1 << 20}}), bomb)
		wantError(t, err, cube.CodeInvalid, "unpacks to more")
	})
}

// sparseBomb is a layer with one file of that size and no content, as GNU tar makes it.
func sparseBomb(size int64) []byte {
	body := make([]byte, 512)
	copy(body, fmt.Sprintf("1\n%d\n0\n", size))
	return assemble(rawPAX(map[string]string{"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "f", "GNU.sparse.realsize": fmt.Sprint(size)}), body)
}

// rawPAX encodes PAX records, of which archive/tar's writer refuses those of sparse files.
func rawPAX(records map[string]string) []byte {
	var b bytes.Buffer
	for k, v := range records {
		n := len(k) + len(v) + 3
		for len(fmt.Sprint(n))+len(k)+len(v)+3 != n {
			n = len(fmt.Sprint(n)) + len(k) + len(v) + 3
		}
		fmt.Fprintf(&b, "%d %s=%s\n", n, k, v)
	}
	return b.Bytes()
}

// assemble builds a tar of a PAX header with those records and one file with that body.
func assemble(pax, body []byte) []byte {
	block := func(name string, kind byte, size int) []byte {
		h := make([]byte, 512)
		copy(h, name)
		copy(h[100:], "0000644\x000000000\x000000000\x00")
		copy(h[124:], fmt.Sprintf("%011o\x00%011o\x00", size, 0))
		h[156] = kind
		copy(h[257:], "ustar\x0000")
		copy(h[148:], "        ")
		sum := 0
		for _, c := range h {
			sum += int(c)
		}
		copy(h[148:], fmt.Sprintf("%06o\x00 ", sum))
		return h
	}
	pad := func(b []byte) []byte { return append(b, make([]byte, (512-len(b)%512)%512)...) }
	out := append(block("PaxHeaders/f", 'x', len(pax)), pad(pax)...)
	out = append(out, append(block("f", '0', len(body)), pad(body)...)...)
	return append(out, make([]byte, 1024)...)
}

func TestBrokenImagesAreRefused(t *testing.T) {
	one := layer(t, file("f", "content"))
	wrong := digest.FromString("something else")
	for name, c := range map[string]struct {
		change func(m *ocispec.Manifest, c *ocispec.Image)
		words  string
	}{
		"another layer digest": {func(m *ocispec.Manifest, _ *ocispec.Image) { m.Layers[0].Digest = wrong }, wrong.Encoded()},
		"another diff ID":      {func(_ *ocispec.Manifest, c *ocispec.Image) { c.RootFS.DiffIDs[0] = wrong }, wrong.String()},
		"diff ID is no digest": {func(_ *ocispec.Manifest, c *ocispec.Image) { c.RootFS.DiffIDs[0] = "../../x" }, "digest"},
		"digest with a path":   {func(m *ocispec.Manifest, _ *ocispec.Image) { m.Layers[0].Digest = "sha256:../../../etc/passwd" }, "digest"},
		"unknown algorithm": {func(m *ocispec.Manifest, _ *ocispec.Image) {
			m.Layers[0].Digest = "md5:d41d8cd98f00b204e9800998ecf8427e"
		}, "digest"},
		"unknown layer type":   {func(m *ocispec.Manifest, _ *ocispec.Image) { m.Layers[0].MediaType = "application/x-encrypted" }, "application/x-encrypted"},
		"no container image":   {func(m *ocispec.Manifest, _ *ocispec.Image) { m.Config.MediaType = "application/vnd.wasm" }, "no container image"},
		"fewer diff IDs":       {func(_ *ocispec.Manifest, c *ocispec.Image) { c.RootFS.DiffIDs = nil }, "describes 0 layers"},
		"negative size":        {func(m *ocispec.Manifest, _ *ocispec.Image) { m.Layers[0].Size = -5 }, "-5"},
		"schema 1":             {func(m *ocispec.Manifest, _ *ocispec.Image) { m.SchemaVersion = 1 }, "schema 1"},
		"huge configuration":   {func(m *ocispec.Manifest, _ *ocispec.Image) { m.Config.Size = 100 << 20 }, "104857600 bytes"},
		"zero byte in env":     {func(_ *ocispec.Manifest, c *ocispec.Image) { c.Config.Env = []string{"A=\x00"} }, "zero byte"},
		"many layers":          {func(m *ocispec.Manifest, _ *ocispec.Image) { m.Layers = make([]ocispec.Descriptor, 1001) }, "1001 layers"},
		"another architecture": {func(_ *ocispec.Manifest, c *ocispec.Image) { c.Architecture = "arm64" }, "linux/arm64, this node runs linux/amd64"},
		"another system":       {func(_ *ocispec.Manifest, c *ocispec.Image) { c.OS = "windows" }, "windows/amd64, this node runs linux/amd64"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := build(t, newStore(t, image.Config{}), testImage{layers: [][]byte{one}, change: c.change}.tar(t))
			wantError(t, err, cube.CodeInvalid, c.words)
		})
	}
}

func TestBrokenArchivesAreRefused(t *testing.T) {
	good := testImage{layers: [][]byte{layer(t, file("f", strings.Repeat("content", 10000)))}}.tar(t)
	b := blobs{}
	m := testImage{}.addTo(b)
	loop := b.addJSON(ocispec.MediaTypeImageIndex, index(m))
	for range 6 {
		loop = b.addJSON(ocispec.MediaTypeImageIndex, index(loop))
	}
	both := blobs{}
	mixed := both.add(ocispec.MediaTypeImageIndex, []byte(`{"schemaVersion":2,"manifests":[],"layers":[],"config":{}}`))
	forged := blobs{}
	fake := testImage{}.addTo(forged)
	forged[fake.Digest] = bytes.Replace(forged[fake.Digest], []byte(`"schemaVersion":2`), []byte(`"schemaVersion":3`), 1)
	two := blobs{}
	first := testImage{layers: [][]byte{layer(t, file("1", ""))}}.addTo(two)
	second := testImage{layers: [][]byte{layer(t, file("2", ""))}}.addTo(two)
	first.Annotations = map[string]string{ocispec.AnnotationRefName: "app:1"}
	second.Annotations = map[string]string{ocispec.AnnotationRefName: "app:2"}

	for name, c := range map[string]struct {
		archive []byte
		words   string
	}{
		"empty":            {nil, "empty"},
		"text":             {[]byte(strings.Repeat("this is no archive ", 100)), "not a tar archive"},
		"other tar":        {layer(t, file("hello", "")), "neither an OCI layout"},
		"truncated":        {good[:len(good)/2], ""},
		"truncated gzip":   {gz(good)[:2000], ""},
		"truncated zstd":   {zst(good)[:500], ""},
		"broken index":     {layer(t, file("oci-layout", "{}"), file("index.json", "{")), "index.json"},
		"empty index":      {layer(t, file("oci-layout", "{}"), file("index.json", "{}")), "no manifest"},
		"missing manifest": {layoutTar(t, blobs{}, m), "no file"},
		"nested indexes":   {layoutTar(t, b, loop), "deep"},
		"index and both":   {layoutTar(t, both, mixed), "members of a manifest"},
		"forged manifest":  {layoutTar(t, forged, fake), "another digest"},
		"two images":       {layoutTar(t, two, first, second), "app:1 and app:2"},
		"huge index":       {layer(t, file("oci-layout", "{}"), file("index.json", strings.Repeat(" ", 5<<20))), "index.json"},
		"link loop":        {layer(t, file("oci-layout", "{}"), symlink("index.json", "index.json")), "neither"},
		"docker without":   {layer(t, file("manifest.json", "[]")), "no image"},
		"docker broken":    {layer(t, file("manifest.json", `{"a":`)), "manifest.json"},
		"docker path":      {layer(t, file("manifest.json", `[{"Config":"../../../etc/passwd","Layers":[]}]`)), "no file"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := build(t, newStore(t, image.Config{}), c.archive)
			wantError(t, err, cube.CodeInvalid, c.words)
		})
	}
}

func TestArchivesThatAreNoFiles(t *testing.T) {
	s := newStore(t, image.Config{})
	for path, code := range map[string]cube.Code{
		filepath.Join(t.TempDir(), "missing.tar"): cube.CodeNotFound,
		t.TempDir():    cube.CodeInvalid,
		"/dev/zero":    cube.CodeInvalid,
		"relative.tar": cube.CodeInvalid,
	} {
		_, err := s.Fetch(context.Background(), tplimage.Source{ArchivePath: path}, nil)
		wantError(t, err, code)
	}
}

func TestTheManifestForThisPlatformIsChosen(t *testing.T) {
	b := blobs{}
	entryFor := func(p ocispec.Platform, name string) ocispec.Descriptor {
		d := testImage{platform: p, layers: [][]byte{layer(t, file(name, ""))}}.addTo(b)
		d.Platform = &p
		return d
	}
	arm := entryFor(ocispec.Platform{OS: "linux", Architecture: "arm64"}, "arm")
	v3 := entryFor(ocispec.Platform{OS: "linux", Architecture: "amd64", Variant: "v3"}, "v3")
	plain := entryFor(linuxAMD64(), "plain")
	attestation := entryFor(ocispec.Platform{OS: "unknown", Architecture: "unknown"}, "attestation")

	nested := b.addJSON(ocispec.MediaTypeImageIndex, index(arm, attestation, v3, plain))
	_, root, err := build(t, newStore(t, image.Config{}), layoutTar(t, b, nested))
	if err != nil || root.Digest != plain.Digest.String() {
		t.Errorf("nested: %+v, %v", root, err)
	}
	_, root, err = build(t, newStore(t, image.Config{}), layoutTar(t, b, arm, plain))
	if err != nil || root.Digest != plain.Digest.String() {
		t.Errorf("flat: %+v, %v", root, err)
	}
	other := b.addJSON(ocispec.MediaTypeImageIndex, index(arm, entryFor(ocispec.Platform{OS: "linux", Architecture: "arm", Variant: "v7"}, "arm7")))
	_, _, err = build(t, newStore(t, image.Config{}), layoutTar(t, b, other))
	wantError(t, err, cube.CodeInvalid, "linux/arm64, linux/arm/v7", "linux/amd64")
}

func TestCompressedArchivesAndDockerArchivesWork(t *testing.T) {
	l := layer(t, file("f", "content"))
	config := ocispec.ImageConfig{Env: []string{"A=b", "broken"}, User: "app:www", WorkingDir: "/srv", Entrypoint: []string{"/e"}, Cmd: []string{"c"}}
	oci := testImage{layers: [][]byte{l}, config: config}
	docker := dockerTar(t, oci)
	var digests []string
	for name, archive := range map[string][]byte{
		"oci": oci.tar(t), "oci gzip": gz(oci.tar(t)), "oci zstd": zst(oci.tar(t)), "docker": docker, "docker gzip": gz(docker),
	} {
		disk, root, err := build(t, newStore(t, image.Config{}), archive)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if b, err := os.ReadFile(filepath.Join(mount(t, disk), "f")); err != nil || string(b) != "content" {
			t.Errorf("%s: %q, %v", name, b, err)
		}
		if c := root.Config; fmt.Sprint(c) != fmt.Sprint(cube.ImageConfig{Env: []string{"A=b"}, User: "app:www", WorkingDir: "/srv", Entrypoint: []string{"/e"}, Cmd: []string{"c"}}) {
			t.Errorf("%s: %+v", name, c)
		}
		if strings.HasPrefix(name, "docker") {
			digests = append(digests, root.Digest)
		}
	}
	if digests[0] != digests[1] {
		t.Errorf("digests %v", digests)
	}
}

// dockerTar packs the image as `docker save` of old did: layers in directories, one of
// them a link.
func dockerTar(t testing.TB, i testImage) []byte {
	t.Helper()
	b := blobs{}
	m, err := decode[ocispec.Manifest](b[i.addTo(b).Digest])
	if err != nil {
		t.Fatal(err)
	}
	files := []entry{
		file("config.json", string(b[m.Config.Digest])),
		file("aaa/layer.tar", string(i.layers[0])), symlink("bbb/layer.tar", "../aaa/layer.tar"),
		file("manifest.json", `[{"Config":"config.json","RepoTags":["app:latest"],"Layers":["bbb/layer.tar"]}]`),
	}
	return layer(t, files...)
}

func TestTheSameImageGivesTheSameDisk(t *testing.T) {
	archive := testImage{layers: everything(t)}.tar(t)
	var sums [2]digest.Digest
	for i := range sums {
		disk, _, err := build(t, newStore(t, image.Config{}), archive)
		if err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(disk)
		if err != nil {
			t.Fatal(err)
		}
		sums[i], err = digest.FromReader(f)
		if err = errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	if sums[0] != sums[1] {
		t.Error("two builds differ")
	}
}

func TestAFullDiskIsNoSpaceAndLeavesNothing(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=8m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	random := make([]byte, 30<<20)
	if _, err := io.ReadFull(devRandom(t), random); err != nil {
		t.Fatal(err)
	}
	archive := write(t, testImage{layers: [][]byte{layer(t, file("big", string(random)))}, pack: bytes.Clone}.tar(t))
	for name, reserve := range map[string]int64{"by the write": 1, "by the reserve": 7 << 20} {
		s := newStore(t, image.Config{ReserveBytes: reserve})
		path := filepath.Join(dir, "root.erofs")
		_, err := s.Build(context.Background(), tplimage.Source{ArchivePath: archive}, path, nil)
		wantError(t, err, cube.CodeNoSpace)
		if left, _ := os.ReadDir(dir); len(left) > 0 {
			t.Errorf("%s: left %v", name, left)
		}
	}
	s, err := image.New(image.Config{ScratchDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	compressed := write(t, gz(bytes.Repeat(random, 1)))
	_, err = s.Fetch(context.Background(), tplimage.Source{ArchivePath: compressed}, nil)
	wantError(t, err, cube.CodeNoSpace)
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}

func TestACanceledBuildLeavesNothing(t *testing.T) {
	archive := write(t, testImage{layers: [][]byte{layer(t, file("big", strings.Repeat("0123456789", 1<<20)))}}.tar(t))
	ctx, cancel := context.WithCancel(context.Background())
	path := filepath.Join(t.TempDir(), "root.erofs")
	_, err := newStore(t, image.Config{}).Build(ctx, tplimage.Source{ArchivePath: archive}, path, func(stage string, done, _ int64) {
		if stage == "unpack" && done > 0 {
			cancel()
		}
	})
	wantError(t, err, cube.CodeCanceled)
	if _, err := os.Lstat(path); err == nil {
		t.Error("there is a root disk")
	}
}

func TestAnExistingFileIsNeverOverwritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "root.erofs")
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := newStore(t, image.Config{}).Build(context.Background(), tplimage.Source{ArchivePath: write(t, testImage{}.tar(t))}, path, nil)
	if !errors.Is(err, os.ErrExist) {
		t.Errorf("got %v", err)
	}
	if b, _ := os.ReadFile(path); string(b) != "precious" {
		t.Errorf("the file is %q now", b)
	}
}
