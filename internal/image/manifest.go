package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	cube "github.com/cubesandbox/cubelet"
)

const (
	maxManifestBytes = 4 << 20
	maxConfigBytes   = 8 << 20
	maxIndexDepth    = 4   // indexes in indexes
	maxManifests     = 100 // manifests read to find the one for this node
	maxLayers        = 1000
)

// Media types of docker's own formats.
const (
	dockerManifestList = "application/vnd.docker.distribution.manifest.list.v2+json"
	dockerManifest     = "application/vnd.docker.distribution.manifest.v2+json"
	dockerConfigType   = "application/vnd.docker.container.image.v1+json"
	dockerLayer        = "application/vnd.docker.image.rootfs.diff.tar"
	dockerForeignLayer = "application/vnd.docker.image.rootfs.foreign.diff.tar"
	ociForeignLayer    = "application/vnd.oci.image.layer.nondistributable.v1.tar"

	attestationAnnotation = "vnd.docker.reference.type"
)

// layerTypes are the media types of layers without the suffix of their compression.
var layerTypes = [...]string{ocispec.MediaTypeImageLayer, ociForeignLayer, dockerLayer, dockerForeignLayer}

// provider gives access to the blobs of one registry repository or archive.
type provider interface {
	// open returns a blob's content, which the caller closes. Codes: NotFound, and those
	// of reading from where it is.
	open(ctx context.Context, d ocispec.Descriptor) (io.ReadCloser, error)
}

// manifest is the manifest that was chosen for the node.
type manifest struct {
	digest digest.Digest
	layers []ocispec.Descriptor
	config ocispec.Image
}

// candidate is a manifest for the node's platform.
type candidate struct {
	desc ocispec.Descriptor
	top  int // index of the entry of the outermost index that led to it
	rank int // of its platform's variant, lowest is best
}

// selector finds the manifest for one platform in a tree of indexes.
type selector struct {
	blobs    provider
	platform ocispec.Platform
	seen     map[digest.Digest]bool
	others   []string // platforms that the image has instead
	found    []candidate
}

// selectManifest returns the manifest for the platform among the entries.
func selectManifest(ctx context.Context, blobs provider, entries []ocispec.Descriptor, p ocispec.Platform) (manifest, error) {
	s := &selector{blobs: blobs, platform: p, seen: map[digest.Digest]bool{}}
	for i, d := range entries {
		if err := s.visit(ctx, d, i, 0); err != nil {
			return manifest{}, err
		}
	}
	slices.SortStableFunc(s.found, func(a, b candidate) int { return a.rank - b.rank })
	if len(s.found) == 0 {
		return manifest{}, s.wrongPlatform()
	}
	best := s.found[0]
	for _, c := range s.found {
		if c.rank == best.rank && c.top != best.top && c.desc.Digest != best.desc.Digest {
			return manifest{}, invalid("the archive holds more than one image for %s: %s and %s", platformName(p), nameOf(best.desc), nameOf(c.desc))
		}
	}
	return s.load(ctx, best.desc)
}

func nameOf(d ocispec.Descriptor) string {
	if name := d.Annotations[ocispec.AnnotationRefName]; name != "" {
		return name
	}
	return d.Digest.String()
}

func (s *selector) wrongPlatform() error {
	if len(s.others) == 0 {
		return invalid("the image has no manifest")
	}
	return invalid("the image is for %s, this node runs %s", strings.Join(s.others, ", "), platformName(s.platform))
}

func (s *selector) visit(ctx context.Context, d ocispec.Descriptor, top, depth int) error {
	if d.Platform != nil && d.Platform.OS == "unknown" || d.Annotations[attestationAnnotation] != "" {
		return nil // says something about an image and is none
	}
	if err := checkDescriptor(d, maxManifestBytes); err != nil {
		return err
	}
	rank, ok := 0, true
	if d.Platform != nil && d.Platform.Architecture != "" {
		rank, ok = matchPlatform(*d.Platform, s.platform)
	}
	if !ok {
		s.other(*d.Platform)
		return nil
	}
	if s.seen[d.Digest] {
		return nil
	}
	s.seen[d.Digest] = true
	if len(s.seen) > maxManifests {
		return invalid("more than %d manifests for %s", maxManifests, platformName(s.platform))
	}
	switch d.MediaType {
	case ocispec.MediaTypeImageManifest, dockerManifest:
		s.found = append(s.found, candidate{d, top, rank})
		return nil
	case ocispec.MediaTypeImageIndex, dockerManifestList:
		return s.visitIndex(ctx, d, top, depth)
	}
	return invalid("%s has the media type %q, which is no image", d.Digest, d.MediaType)
}

func (s *selector) visitIndex(ctx context.Context, d ocispec.Descriptor, top, depth int) error {
	if depth >= maxIndexDepth {
		return invalid("indexes are nested more than %d deep", maxIndexDepth)
	}
	b, err := readBlob(ctx, s.blobs, d, maxManifestBytes)
	if err != nil {
		return fmt.Errorf("index: %w", err)
	}
	index, err := decodeIndex(b)
	if err != nil {
		return fmt.Errorf("index %s: %w", d.Digest, err)
	}
	for _, child := range index.Manifests {
		if child.Annotations[ocispec.AnnotationRefName] == "" && nameOf(d) != d.Digest.String() {
			child.Annotations = map[string]string{ocispec.AnnotationRefName: nameOf(d), attestationAnnotation: child.Annotations[attestationAnnotation]}
		}
		if err := s.visit(ctx, child, top, depth+1); err != nil {
			return err
		}
	}
	return nil
}

func (s *selector) other(p ocispec.Platform) {
	if name := platformName(p); !slices.Contains(s.others, name) {
		s.others = append(s.others, name)
	}
}

// load reads the manifest and its configuration.
func (s *selector) load(ctx context.Context, d ocispec.Descriptor) (manifest, error) {
	b, err := readBlob(ctx, s.blobs, d, maxManifestBytes)
	if err != nil {
		return manifest{}, fmt.Errorf("manifest: %w", err)
	}
	m, err := decodeManifest(b)
	if err != nil {
		return manifest{}, fmt.Errorf("manifest %s: %w", d.Digest, err)
	}
	b, err = readBlob(ctx, s.blobs, m.Config, maxConfigBytes)
	if err != nil {
		return manifest{}, fmt.Errorf("image configuration: %w", err)
	}
	config, err := decodeConfig(b, len(m.Layers))
	if err != nil {
		return manifest{}, fmt.Errorf("image configuration %s: %w", m.Config.Digest, err)
	}
	if err := checkPlatform(config, s.platform); err != nil {
		return manifest{}, err
	}
	return manifest{digest: d.Digest, layers: m.Layers, config: config}, nil
}

// checkPlatform refuses an image that says it is for another platform. Images that say
// nothing are taken.
func checkPlatform(config ocispec.Image, want ocispec.Platform) error {
	have := config.Platform
	if have.OS == "" {
		have.OS = want.OS
	}
	if have.Architecture == "" {
		have.Architecture = want.Architecture
	}
	if _, ok := matchPlatform(have, want); !ok {
		return invalid("the image is for %s, this node runs %s", platformName(have), platformName(want))
	}
	return nil
}

// matchPlatform reports whether an image for platform have runs on want, and how good the
// variant fits: the one that asks for the fewest CPU features is best.
func matchPlatform(have, want ocispec.Platform) (rank int, ok bool) {
	if have.OS != want.OS || have.Architecture != want.Architecture {
		return 0, false
	}
	switch have.Variant {
	case "", "v1":
		return 0, true
	case "v2":
		return 1, true
	case "v3":
		return 2, true
	}
	return 3, true
}

func platformName(p ocispec.Platform) string {
	name := p.OS + "/" + p.Architecture
	if p.Variant != "" {
		name += "/" + p.Variant
	}
	return name
}

// checkDescriptor refuses what can be no descriptor of a blob: a digest that is none may
// be an attempt to name another file.
func checkDescriptor(d ocispec.Descriptor, limit int64) error {
	if err := d.Digest.Validate(); err != nil {
		return invalid("digest %.100q: %w", string(d.Digest), err)
	}
	switch {
	case d.Size < 0:
		return invalid("%s has the size %d", d.Digest, d.Size)
	case limit > 0 && d.Size > limit:
		return invalid("%s has %d bytes, at most %d are possible for its kind", d.Digest, d.Size, limit)
	}
	return nil
}

// readBlob reads a small blob and verifies its size and digest.
func readBlob(ctx context.Context, blobs provider, d ocispec.Descriptor, limit int64) ([]byte, error) {
	if err := checkDescriptor(d, limit); err != nil {
		return nil, err
	}
	r, err := blobs.open(ctx, d)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", d.Digest, err)
	}
	b, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err = errors.Join(err, r.Close()); err != nil {
		return nil, fmt.Errorf("read %s: %w", d.Digest, err)
	}
	switch {
	case int64(len(b)) != d.Size:
		return nil, invalid("%s has %d bytes instead of %d", d.Digest, len(b), d.Size)
	case d.Digest.Algorithm().FromBytes(b) != d.Digest:
		return nil, invalid("the content of %s has another digest", d.Digest)
	}
	return b, nil
}

// shape tells what a document is by its members: one that is both an index and a manifest
// would mean different images to different readers.
type shape struct {
	Manifests, Config, Layers json.RawMessage
}

func decodeIndex(b []byte) (ocispec.Index, error) {
	var index ocispec.Index
	var sh shape
	if err := errors.Join(json.Unmarshal(b, &index), json.Unmarshal(b, &sh)); err != nil {
		return index, invalid("%w", err)
	}
	if sh.Config != nil || sh.Layers != nil {
		return index, invalid("it is an index with the members of a manifest")
	}
	return index, nil
}

// decodeManifest decodes a manifest and checks that its layers can be unpacked.
func decodeManifest(b []byte) (ocispec.Manifest, error) {
	var m ocispec.Manifest
	var sh shape
	if err := errors.Join(json.Unmarshal(b, &m), json.Unmarshal(b, &sh)); err != nil {
		return m, invalid("%w", err)
	}
	switch {
	case sh.Manifests != nil:
		return m, invalid("it is a manifest with the members of an index")
	case m.SchemaVersion == 1:
		return m, cube.Errorf(cube.CodeInvalid, "schema 1 is not supported").WithHint("push the image again with a current tool")
	case m.Config.Digest == "":
		return m, invalid("it names no configuration")
	case m.Config.MediaType != ocispec.MediaTypeImageConfig && m.Config.MediaType != dockerConfigType:
		return m, invalid("its configuration has the media type %q, so it is no container image", m.Config.MediaType)
	case len(m.Layers) > maxLayers:
		return m, invalid("it has %d layers, at most %d are possible", len(m.Layers), maxLayers)
	}
	if err := checkDescriptor(m.Config, maxConfigBytes); err != nil {
		return m, err
	}
	for i, l := range m.Layers {
		if err := checkDescriptor(l, 0); err != nil {
			return m, fmt.Errorf("layer %d: %w", i+1, err)
		}
		if !knownLayer(l.MediaType) {
			return m, invalid("layer %d has the media type %q, which is not supported", i+1, l.MediaType)
		}
	}
	return m, nil
}

func knownLayer(mediaType string) bool {
	for _, base := range layerTypes {
		switch rest, ok := strings.CutPrefix(mediaType, base); {
		case !ok:
		case rest == "", rest == "+gzip", rest == ".gzip", rest == "+zstd", rest == ".zstd":
			return true
		}
	}
	return false
}

// decodeConfig decodes an image configuration of that many layers.
func decodeConfig(b []byte, layers int) (ocispec.Image, error) {
	var c ocispec.Image
	if err := json.Unmarshal(b, &c); err != nil {
		return c, invalid("%w", err)
	}
	if len(c.RootFS.DiffIDs) != layers {
		return c, invalid("it describes %d layers, the manifest has %d", len(c.RootFS.DiffIDs), layers)
	}
	for _, id := range c.RootFS.DiffIDs {
		if err := id.Validate(); err != nil {
			return c, invalid("digest %.100q: %w", string(id), err)
		}
	}
	for _, text := range slices.Concat(c.Config.Env, c.Config.Entrypoint, c.Config.Cmd, []string{c.Config.WorkingDir, c.Config.User}) {
		if strings.ContainsRune(text, 0) {
			return c, invalid("%q contains a zero byte", text)
		}
	}
	return c, nil
}

// imageConfig takes the part of the configuration that is honoured.
func imageConfig(c ocispec.ImageConfig) cube.ImageConfig {
	out := cube.ImageConfig{WorkingDir: c.WorkingDir, User: c.User, Entrypoint: c.Entrypoint, Cmd: c.Cmd}
	for _, kv := range c.Env {
		if key, _, ok := strings.Cut(kv, "="); ok && key != "" {
			out.Env = append(out.Env, kv)
		}
	}
	return out
}
