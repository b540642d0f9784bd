package image_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/image"
	"github.com/cubesandbox/cubelet/internal/tplimage"
)

// limits keep a fuzzer's inputs small in time.
func limits() image.Config {
	return image.Config{Limits: image.Limits{Bytes: 1 << 20, Entries: 1000, MetadataBytes: 1 << 20}}
}

// FuzzArchive: any file is an image or Invalid, and nothing is left of it.
func FuzzArchive(f *testing.F) {
	good := testImage{layers: [][]byte{layer(f, file("f", "content"))}}
	for _, seed := range [][]byte{good.tar(f), gz(good.tar(f)), zst(good.tar(f)), dockerTar(f, good), nil} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, archive []byte) { mustBeInvalid(t, archive) })
}

// FuzzLayer: any stream is a layer or Invalid.
func FuzzLayer(f *testing.F) {
	for _, seed := range [][]byte{
		layer(f, file("f", "content"), folder("d"), symlink("d/l", "/f"), hardlink("h", "d/../f")),
		layer(f, file("a/b", ""), file("a/.wh..wh..opq", ""), file(".wh.a", "")),
		assemble(rawPAX(map[string]string{"path": "long", "SCHILY.xattr.user.a": "b", "uid": "77"}), []byte("body")),
		sparseBomb(1 << 40),
	} {
		f.Add(seed)
		f.Add(gz(seed))
	}
	f.Fuzz(func(t *testing.T, l []byte) {
		mustBeInvalid(t, testImage{layers: [][]byte{l}, pack: func(b []byte) []byte { return b }}.tar(t))
	})
}

// FuzzManifest: any manifest and configuration are an image or Invalid.
func FuzzManifest(f *testing.F) {
	b := blobs{}
	d := testImage{layers: [][]byte{layer(f, file("f", ""))}}.addTo(b)
	m, err := decode[ocispec.Manifest](b[d.Digest])
	if err != nil {
		f.Fatal(err)
	}
	f.Add(string(b[d.Digest]), string(b[m.Config.Digest]), d.MediaType)
	f.Add(`{"manifests":[{}]}`, `{}`, ocispec.MediaTypeImageIndex)
	f.Fuzz(func(t *testing.T, text, config, mediaType string) {
		b := blobs{}
		c := b.add(ocispec.MediaTypeImageConfig, []byte(config))
		text = strings.ReplaceAll(text, m.Config.Digest.String(), c.Digest.String())
		mustBeInvalid(t, layoutTar(t, b, b.add(mediaType, []byte(text))))
	})
}

func mustBeInvalid(t *testing.T, archive []byte) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "root.erofs")
	_, err := newStore(t, limits()).Build(context.Background(), tplimage.Source{ArchivePath: write(t, archive)}, path, nil)
	_, statErr := os.Lstat(path)
	switch {
	case err == nil && statErr != nil:
		t.Errorf("no error and no root disk: %v", statErr)
	case err != nil && statErr == nil:
		t.Error("an error and a root disk")
	case err != nil && cube.CodeOf(err) != cube.CodeInvalid:
		t.Errorf("%s: %v", cube.CodeOf(err), err)
	}
}
