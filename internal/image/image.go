// Package image turns OCI images into root disks: it pulls from registries into
// containerd's content store or reads archives, and flattens the layers straight into an
// EROFS image. No file of an image is ever unpacked on the host.
package image

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"

	containerd "github.com/containerd/containerd/v2/client"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/image/erofs"
	"github.com/cubesandbox/cubelet/internal/tplimage"
)

// Config configures a Store.
type Config struct {
	// Client reaches the containerd that keeps pulled blobs. Nil: archives only.
	Client *containerd.Client
	// ScratchDir is an existing directory for temporary files. They have no name, so
	// none survives a crash.
	ScratchDir string
	// DockerConfig is the file with registry credentials. Empty: where docker has it.
	DockerConfig string
	Limits       Limits
	// ReserveBytes is the free space that writing an image leaves. Zero: 64 MiB.
	ReserveBytes int64
	Log          *slog.Logger
}

// Store makes root disks from images. It is safe for concurrent use.
type Store struct {
	client       *containerd.Client
	scratch      string
	dockerConfig string
	limits       Limits
	reserve      int64
	log          *slog.Logger
	platform     ocispec.Platform
}

// Progress is told of bytes done and bytes in all, from one goroutine at a time.
type Progress func(done, total int64)

// New returns a Store. Its errors are about the scratch directory.
func New(c Config) (*Store, error) {
	if info, err := os.Stat(c.ScratchDir); err != nil || !info.IsDir() {
		return nil, cube.Errorf(cube.CodeFailedPrecondition, "the scratch directory %q does not exist", c.ScratchDir)
	}
	if c.ReserveBytes == 0 {
		c.ReserveBytes = 64 << 20
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	s := &Store{
		client:       c.Client,
		scratch:      c.ScratchDir,
		dockerConfig: c.DockerConfig,
		limits:       c.Limits.withDefaults(),
		reserve:      c.ReserveBytes,
		log:          c.Log,
		platform:     ocispec.Platform{OS: "linux", Architecture: runtime.GOARCH},
	}
	return s, nil
}

// Image is an image whose blobs are on this node. The caller releases it.
type Image struct {
	Ref      string // the reference or archive, as it was given
	Digest   string // of the manifest
	Platform string // for example linux/amd64
	Config   cube.ImageConfig

	store    *Store
	blobs    provider
	manifest manifest
	// named is whether layers are named by the digest of the blob itself, not only by
	// that of its uncompressed content.
	named   bool
	release func(context.Context) error
}

// Fetch brings an image to this node: it pulls, or indexes an archive. What was pulled is
// kept until Release; after an interrupted pull it is kept for a day, so that the next
// Fetch goes on where this one ended. progress may be nil. Codes: Invalid (broken or
// hostile image, other architecture), NotFound, Unavailable (registry), PermissionDenied
// (credentials), NoSpace.
func (s *Store) Fetch(ctx context.Context, src tplimage.Source, progress Progress) (*Image, error) {
	if progress == nil {
		progress = func(int64, int64) {}
	}
	switch {
	case src.Image != "" && src.ArchivePath != "":
		return nil, cube.InvalidField("archivePath", "only one of image and archivePath can be given")
	case src.ArchivePath != "":
		return s.fetchArchive(ctx, src.ArchivePath)
	case src.Image != "":
		return s.pull(ctx, src, progress)
	}
	return nil, cube.InvalidField("image", "is required")
}

func (s *Store) fetchArchive(ctx context.Context, name string) (*Image, error) {
	if !filepath.IsAbs(name) {
		return nil, cube.InvalidField("archivePath", "%q is not an absolute path", name)
	}
	a, err := s.openArchive(ctx, name)
	if err != nil {
		return nil, err
	}
	m, err := a.manifest(ctx, s.platform)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("archive %s: %w", name, err), a.close())
	}
	image := s.image(name, m, a)
	image.named = len(a.byDigest) == 0
	image.release = func(context.Context) error { return a.close() }
	return image, nil
}

func (s *Store) image(ref string, m manifest, blobs provider) *Image {
	return &Image{
		Ref:      ref,
		Digest:   m.digest.String(),
		Platform: platformName(s.platform),
		Config:   imageConfig(m.config.Config),
		store:    s,
		blobs:    blobs,
		manifest: m,
		named:    true,
	}
}

// Release gives back what Fetch holds.
func (im *Image) Release(ctx context.Context) error { return im.release(ctx) }

// Build fetches an image, writes its root disk to path and releases it. stage is "pull"
// or "unpack" in calls of progress, which may be nil.
func (s *Store) Build(ctx context.Context, src tplimage.Source, path string, progress func(stage string, done, total int64)) (root tplimage.Root, err error) {
	if progress == nil {
		progress = func(string, int64, int64) {}
	}
	image, err := s.Fetch(ctx, src, func(done, total int64) { progress("pull", done, total) })
	if err != nil {
		return tplimage.Root{}, err
	}
	defer func() { err = errors.Join(err, image.Release(context.WithoutCancel(ctx))) }()
	n, err := image.WriteRoot(ctx, path, func(done, total int64) { progress("unpack", done, total) })
	if err != nil {
		return tplimage.Root{}, err
	}
	return tplimage.Root{Ref: image.Ref, Digest: image.Digest, Platform: image.Platform, Config: image.Config, Bytes: n}, nil
}

// WriteRoot writes the image's files as an EROFS image to path, which must not exist, and
// returns its size. The file is synced; after an error there is none. progress counts
// the bytes of the layers as they are stored and may be nil. Codes: Invalid, NoSpace,
// Canceled, DeadlineExceeded, Internal.
func (im *Image) WriteRoot(ctx context.Context, path string, progress Progress) (_ int64, err error) {
	if progress == nil {
		progress = func(int64, int64) {}
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return 0, err
	}
	defer func() {
		err = errors.Join(err, f.Close())
		if err != nil {
			err = errors.Join(err, os.Remove(path))
		}
	}()
	spool, err := im.store.tempFile("tails")
	if err != nil {
		return 0, err
	}
	defer spool.Close()
	w := erofs.NewWriter(erofs.Options{File: f, Spool: spool, Check: im.store.spaceCheck(f)})
	root, err := im.flatten(ctx, w, progress)
	if err != nil {
		return 0, err
	}
	size, err := w.Finish(root, im.super())
	if err != nil {
		return 0, err
	}
	if err := f.Sync(); err != nil {
		return 0, fmt.Errorf("sync %s: %w", path, err)
	}
	return size, nil
}

// super names the file system after the image, so that the same image gives the same disk.
func (im *Image) super() erofs.Super {
	var s erofs.Super
	sum := sha256.Sum256([]byte(im.Digest))
	copy(s.UUID[:], sum[:])
	s.UUID[6] = s.UUID[6]&0x0f | 0x40
	s.UUID[8] = s.UUID[8]&0x3f | 0x80
	if created := im.manifest.config.Created; created != nil {
		s.BuildTime = created.Unix()
	}
	return s
}

func (im *Image) flatten(ctx context.Context, w *erofs.Writer, progress Progress) (*erofs.Inode, error) {
	var done, total int64
	for _, l := range im.manifest.layers {
		total += l.Size
	}
	progress(0, total)
	f := newFlattener(w, im.store.limits)
	stream := im.store.limits.streamBytes()
	for i, l := range im.manifest.layers {
		count := func(n int) {
			done += int64(n)
			progress(done, total)
		}
		if err := im.layer(ctx, f, i, &stream, count); err != nil {
			return nil, classify(fmt.Errorf("layer %d of %d (%s): %w", i+1, len(im.manifest.layers), l.Digest, err))
		}
	}
	return f.tree.root.inodes(), nil
}

// layer applies one layer and verifies what was read.
func (im *Image) layer(ctx context.Context, f *flattener, i int, stream *int64, count func(int)) (err error) {
	desc := im.manifest.layers[i]
	blob, err := im.blobs.open(ctx, desc)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, blob.Close()) }()

	packed := desc.Digest.Algorithm().Digester()
	raw := newSource(ctx, io.TeeReader(blob, packed.Hash()), count)
	plain, _, err := decompress(raw)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, plain.Close()) }()
	limited := limitStream(plain, *stream)
	id := im.manifest.config.RootFS.DiffIDs[i]
	unpacked := id.Algorithm().Digester()
	body := io.TeeReader(limited, unpacked.Hash())
	if err := f.apply(body, i); err != nil {
		return err
	}
	// Digests cover what follows the end of the archive, too.
	for _, rest := range []io.Reader{body, raw} {
		if _, err := io.Copy(io.Discard, rest); err != nil {
			return err
		}
	}
	*stream = limited.left
	switch {
	case im.named && packed.Digest() != desc.Digest:
		return invalid("the content has the digest %s", packed.Digest())
	case unpacked.Digest() != id:
		return invalid("the unpacked content has the digest %s instead of %s", unpacked.Digest(), id)
	}
	return nil
}

// tempFile makes a file that vanishes when it is closed.
func (s *Store) tempFile(purpose string) (*os.File, error) {
	f, err := os.CreateTemp(s.scratch, "image-"+purpose+"-*")
	if err != nil {
		return nil, fmt.Errorf("make temporary file: %w", err)
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// spaceCheck returns a function that fails when the file system of f is nearly full.
func (s *Store) spaceCheck(f *os.File) func() error {
	return func() error {
		var st unix.Statfs_t
		if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
			return fmt.Errorf("free space of %s: %w", f.Name(), err)
		}
		if free := int64(st.Bavail) * st.Bsize; free < s.reserve {
			return cube.Errorf(cube.CodeNoSpace, "only %d MiB are left on the disk of %s", free>>20, filepath.Dir(f.Name()))
		}
		return nil
	}
}
