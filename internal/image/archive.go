package image

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	cube "github.com/cubesandbox/cubelet"
)

const (
	maxArchiveFiles = 100_000
	maxArchiveLinks = 10 // links followed to one file of an archive
)

// span is a part of an archive.
type span struct{ off, size int64 }

// archive is an image archive whose files are read in place.
type archive struct {
	file  *os.File
	files map[string]span
	links map[string]string
	// byDigest names the files of blobs that are not named by their digest.
	byDigest map[digest.Digest]string
}

// openArchive indexes the archive at path. A compressed one is unpacked to a nameless
// file in the scratch directory first.
func (s *Store) openArchive(ctx context.Context, name string) (*archive, error) {
	f, err := os.Open(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, &cube.Error{Code: cube.CodeNotFound, Field: "archivePath", Err: fmt.Errorf("%s does not exist on this node", name)}
	case err != nil:
		return nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = &cube.Error{Code: cube.CodeInvalid, Field: "archivePath", Err: fmt.Errorf("%s is not a file", name)}
	}
	if err == nil {
		f, err = s.plainTar(ctx, f)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	a := &archive{file: f, files: map[string]span{}, links: map[string]string{}, byDigest: map[digest.Digest]string{}}
	if err := a.index(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("archive %s: %w", name, err), f.Close())
	}
	return a, nil
}

// plainTar returns f itself, or its decompressed content. It closes f unless it returns it.
func (s *Store) plainTar(ctx context.Context, f *os.File) (*os.File, error) {
	src := newSource(ctx, f, nil)
	r, compressed, err := decompress(src)
	if err != nil {
		return f, classify(err)
	}
	if !compressed {
		_, err := f.Seek(0, io.SeekStart)
		return f, err
	}
	defer r.Close()
	spool, err := s.tempFile("archive")
	if err != nil {
		return f, err
	}
	dst := &checkedWriter{w: spool, check: s.spaceCheck(spool)}
	if _, err := io.Copy(dst, limitStream(r, s.limits.streamBytes())); err != nil {
		return f, errors.Join(classify(fmt.Errorf("decompress archive: %w", err)), spool.Close())
	}
	if _, err := spool.Seek(0, io.SeekStart); err != nil {
		return f, errors.Join(err, spool.Close())
	}
	return spool, f.Close()
}

func (a *archive) close() error { return a.file.Close() }

// index records where each file of the archive is. The tar reader reads whole records
// only, so the file's offset after a header is where the content begins.
func (a *archive) index(ctx context.Context) error {
	tr := tar.NewReader(a.file)
	for n := 0; ; n++ {
		hdr, err := tr.Next()
		switch {
		case errors.Is(err, io.EOF) && n > 0:
			return nil
		case errors.Is(err, io.EOF):
			return invalid("it is empty")
		case err != nil:
			return classify(fmt.Errorf("not a tar archive, or a truncated one: %w", err))
		case n >= maxArchiveFiles:
			return invalid("it holds more than %d files", maxArchiveFiles)
		case ctx.Err() != nil:
			return ctx.Err()
		}
		if err := a.add(hdr); err != nil {
			return err
		}
	}
}

func (a *archive) add(hdr *tar.Header) error {
	name := path.Clean("/" + hdr.Name)[1:]
	switch hdr.Typeflag {
	case tar.TypeReg:
		off, err := a.file.Seek(0, io.SeekCurrent)
		if err != nil {
			return fmt.Errorf("seek: %w", err)
		}
		a.files[name] = span{off, hdr.Size}
	case tar.TypeSymlink:
		a.links[name] = path.Clean("/" + path.Join(path.Dir(name), hdr.Linkname))[1:]
	case tar.TypeLink:
		a.links[name] = path.Clean("/" + hdr.Linkname)[1:]
	}
	return nil
}

// section returns a file of the archive.
func (a *archive) section(name string) (*io.SectionReader, error) {
	name = path.Clean("/" + name)[1:]
	for range maxArchiveLinks {
		if sp, ok := a.files[name]; ok {
			return io.NewSectionReader(a.file, sp.off, sp.size), nil
		}
		next, ok := a.links[name]
		if !ok {
			break
		}
		name = next
	}
	return nil, invalid("the archive has no file %q", name)
}

func (a *archive) open(_ context.Context, d ocispec.Descriptor) (io.ReadCloser, error) {
	name, ok := a.byDigest[d.Digest]
	if !ok {
		name = path.Join(ocispec.ImageBlobsDir, d.Digest.Algorithm().String(), d.Digest.Encoded())
	}
	r, err := a.section(name)
	if err != nil {
		return nil, err
	}
	return io.NopCloser(r), nil
}

func (a *archive) read(name string, limit int64) ([]byte, error) {
	r, err := a.section(name)
	if err != nil {
		return nil, err
	}
	if r.Size() > limit {
		return nil, invalid("%s has %d bytes, at most %d are possible", name, r.Size(), limit)
	}
	b, err := io.ReadAll(r)
	if err == nil && int64(len(b)) != r.Size() {
		err = invalid("%s is truncated", name)
	}
	return b, err
}

func (a *archive) has(name string) bool {
	_, err := a.section(name)
	return err == nil
}

// manifest returns the image of the archive for the platform.
func (a *archive) manifest(ctx context.Context, p ocispec.Platform) (manifest, error) {
	switch {
	case a.has(ocispec.ImageIndexFile) && a.has(ocispec.ImageLayoutFile):
		b, err := a.read(ocispec.ImageIndexFile, maxManifestBytes)
		if err != nil {
			return manifest{}, err
		}
		index, err := decodeIndex(b)
		if err != nil {
			return manifest{}, fmt.Errorf("%s: %w", ocispec.ImageIndexFile, err)
		}
		return selectManifest(ctx, a, index.Manifests, p)
	case a.has(dockerArchiveIndex):
		return a.dockerManifest(p)
	}
	return manifest{}, invalid("it is neither an OCI layout (%s) nor made by `docker save` (%s)", ocispec.ImageLayoutFile, dockerArchiveIndex)
}

const dockerArchiveIndex = "manifest.json"

// dockerImage is one image of a `docker save` archive.
type dockerImage struct {
	Config   string
	RepoTags []string
	Layers   []string
}

func decodeDockerArchive(b []byte) ([]dockerImage, error) {
	var images []dockerImage
	if err := json.Unmarshal(b, &images); err != nil {
		return nil, invalid("%s: %w", dockerArchiveIndex, err)
	}
	if len(images) == 0 {
		return nil, invalid("%s names no image", dockerArchiveIndex)
	}
	for _, image := range images {
		if len(image.Layers) > maxLayers {
			return nil, invalid("%s: an image has %d layers, at most %d are possible", dockerArchiveIndex, len(image.Layers), maxLayers)
		}
	}
	return images, nil
}

// dockerManifest makes a manifest for the image of a `docker save` archive, which has
// none. Its layers are named by the digests of their uncompressed content.
func (a *archive) dockerManifest(p ocispec.Platform) (manifest, error) {
	b, err := a.read(dockerArchiveIndex, maxManifestBytes)
	if err != nil {
		return manifest{}, err
	}
	images, err := decodeDockerArchive(b)
	if err != nil {
		return manifest{}, err
	}
	if len(images) > 1 {
		var names []string
		for _, image := range images {
			names = append(names, slices.Concat(image.RepoTags, []string{image.Config})[0])
		}
		return manifest{}, invalid("the archive holds %d images: %s", len(images), strings.Join(names, ", "))
	}
	if b, err = a.read(images[0].Config, maxConfigBytes); err != nil {
		return manifest{}, err
	}
	config, err := decodeConfig(b, len(images[0].Layers))
	if err != nil {
		return manifest{}, fmt.Errorf("image configuration: %w", err)
	}
	if err := checkPlatform(config, p); err != nil {
		return manifest{}, err
	}
	m := manifest{config: config}
	for i, name := range images[0].Layers {
		r, err := a.section(name)
		if err != nil {
			return manifest{}, err
		}
		id := config.RootFS.DiffIDs[i]
		a.byDigest[id] = name
		m.layers = append(m.layers, ocispec.Descriptor{MediaType: dockerLayer, Digest: id, Size: r.Size()})
	}
	m.digest, err = synthesize(m, b)
	return m, err
}

// synthesize returns the digest that a manifest of the same content has.
func synthesize(m manifest, config []byte) (digest.Digest, error) {
	b, err := json.Marshal(ocispec.Manifest{
		MediaType: dockerManifest,
		Config:    ocispec.Descriptor{MediaType: dockerConfigType, Digest: digest.FromBytes(config), Size: int64(len(config))},
		Layers:    m.layers,
	})
	if err != nil {
		return "", fmt.Errorf("encode manifest: %w", err)
	}
	return digest.FromBytes(b), nil
}
