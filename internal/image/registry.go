package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/containerd/v2/pkg/reference"
	"github.com/containerd/errdefs"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/tplimage"
)

const (
	// pullLease is how long blobs of an interrupted pull are kept.
	pullLease = 24 * time.Hour
	// stallTimeout ends an attempt in which the registry sends nothing.
	stallTimeout   = 60 * time.Second
	pullAttempts   = 3
	firstBackoff   = 300 * time.Millisecond
	parallelLayers = 3
)

var errStalled = errors.New("the registry stopped sending")

// pull brings an image's blobs into the content store under a lease of its own.
func (s *Store) pull(ctx context.Context, src tplimage.Source, progress Progress) (_ *Image, err error) {
	ref, err := name.ParseReference(src.Image)
	if err == nil {
		_, err = reference.Parse(ref.Name()) // containerd knows more that is impossible
	}
	if err != nil {
		return nil, cube.InvalidField("image", "%q: %w", src.Image, err)
	}
	if s.client == nil {
		return nil, cube.Errorf(cube.CodeFailedPrecondition, "this node has no containerd to pull images with")
	}
	lease, err := s.client.LeasesService().Create(ctx, leases.WithRandomID(), leases.WithExpiration(pullLease))
	if err != nil {
		return nil, fmt.Errorf("create lease: %w", err)
	}
	ctx = leases.WithLease(ctx, lease.ID)
	release := func(ctx context.Context) error {
		if err := s.client.LeasesService().Delete(ctx, lease, leases.SynchronousDelete); ignoreNotFound(err) != nil {
			return fmt.Errorf("delete lease: %w", err)
		}
		return nil
	}
	p := &puller{store: s.client.ContentStore(), resolver: s.resolver(ctx, src.PlainHTTP), ref: ref.Name(), progress: progress, ranges: map[string]int64{}}
	m, err := p.run(ctx, s.platform)
	if err == nil {
		image := s.image(src.Image, m, p)
		image.release = release
		return image, nil
	}
	err = registryError(ctx, err)
	if resumable(err) {
		s.log.Info("pull interrupted, its blobs are kept for the next one", "image", src.Image, "kept", pullLease)
	} else {
		err = errors.Join(err, release(context.WithoutCancel(ctx)))
	}
	return nil, fmt.Errorf("pull %s: %w", src.Image, err)
}

// resumable reports whether a later attempt can go on where this one ended.
func resumable(err error) bool {
	code := cube.CodeOf(err)
	return code == cube.CodeUnavailable || code == cube.CodeDeadlineExceeded || code == cube.CodeCanceled
}

func (s *Store) resolver(ctx context.Context, plainHTTP bool) remotes.Resolver {
	plain := docker.MatchLocalhost
	if plainHTTP {
		plain = docker.MatchAllHosts
	}
	auth := docker.NewDockerAuthorizer(docker.WithAuthCreds(func(host string) (string, string, error) {
		return s.credentials(ctx, host)
	}))
	return docker.NewResolver(docker.ResolverOptions{
		Hosts: docker.ConfigureDefaultRegistries(docker.WithAuthorizer(auth), docker.WithPlainHTTP(plain)),
	})
}

// puller is the provider of one image in a registry: it copies blobs to the content store
// when they are asked for.
type puller struct {
	store    content.Store
	resolver remotes.Resolver
	fetcher  remotes.Fetcher
	ref      string

	mu       sync.Mutex // held while progress is called
	progress Progress
	ranges   map[string]int64 // bytes that are here, by digest
	total    int64
}

func (p *puller) run(ctx context.Context, platform ocispec.Platform) (manifest, error) {
	var desc ocispec.Descriptor
	err := retry(ctx, func(ctx context.Context) (err error) {
		var resolved string
		if resolved, desc, err = p.resolver.Resolve(ctx, p.ref); err == nil {
			p.fetcher, err = p.resolver.Fetcher(ctx, resolved)
		}
		return err
	})
	if err != nil {
		return manifest{}, err
	}
	m, err := selectManifest(ctx, p, []ocispec.Descriptor{desc}, platform)
	if err != nil {
		return manifest{}, err
	}
	for _, l := range distinct(m.layers) {
		p.total += l.Size
	}
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(parallelLayers)
	for _, l := range distinct(m.layers) {
		group.Go(func() error { return p.fetch(groupCtx, l, true) })
	}
	return m, group.Wait()
}

// distinct returns the blobs without repetitions.
func distinct(all []ocispec.Descriptor) []ocispec.Descriptor {
	var out []ocispec.Descriptor
	seen := map[digest.Digest]bool{}
	for _, d := range all {
		if !seen[d.Digest] {
			seen[d.Digest] = true
			out = append(out, d)
		}
	}
	return out
}

// open implements provider.
func (p *puller) open(ctx context.Context, d ocispec.Descriptor) (io.ReadCloser, error) {
	if err := p.fetch(ctx, d, false); err != nil {
		return nil, registryError(ctx, err)
	}
	ra, err := p.store.ReaderAt(ctx, d)
	if err != nil {
		return nil, fmt.Errorf("open blob: %w", err)
	}
	return struct {
		io.Reader
		io.Closer
	}{content.NewReader(ra), ra}, nil
}

// fetch makes sure that a blob is in the content store. It goes on where an earlier
// attempt ended.
func (p *puller) fetch(ctx context.Context, d ocispec.Descriptor, count bool) error {
	d.URLs, d.Data = nil, nil // only what the registry itself serves
	f := &countingFetcher{Fetcher: p.fetcher, at: func(int64) {}}
	if count {
		f.at = func(offset int64) { p.report(d, offset) }
	}
	err := retry(ctx, func(ctx context.Context) error {
		f.watch = newWatchdog(ctx)
		defer f.watch.stop()
		err := remotes.Fetch(f.watch.ctx, p.store, f, d)
		if err == nil || errdefs.IsAlreadyExists(err) {
			return nil
		}
		if cause := context.Cause(f.watch.ctx); cause != nil && ctx.Err() == nil {
			err = fmt.Errorf("%w: %w", cause, err)
		}
		if errdefs.IsFailedPrecondition(err) || hasStatus(err, http.StatusRequestedRangeNotSatisfiable) {
			// The content has another size or digest, or cannot be read from the middle.
			// What is here must not be the beginning of the next attempt.
			err = errors.Join(err, ignoreNotFound(p.store.Abort(ctx, remotes.MakeRefKey(ctx, d))))
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("%s: %w", d.Digest, err)
	}
	f.at(d.Size)
	return nil
}

func ignoreNotFound(err error) error {
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

func (p *puller) report(d ocispec.Descriptor, offset int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ranges[d.Digest.String()] = offset
	var done int64
	for _, n := range p.ranges {
		done += n
	}
	p.progress(min(done, p.total), p.total)
}

// retry repeats do while its error is one that may go away.
func retry(ctx context.Context, do func(context.Context) error) error {
	for attempt, wait := 1, firstBackoff; ; attempt, wait = attempt+1, wait*3 {
		err := do(ctx)
		if err == nil || ctx.Err() != nil || attempt == pullAttempts || !transient(ctx, err, attempt) {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(wait):
		}
	}
}

// transient reports whether another attempt may help. Wrong content gets one: what was
// wrong may be the part that an interrupted pull left behind.
func transient(ctx context.Context, err error, attempt int) bool {
	if errdefs.IsFailedPrecondition(err) {
		return attempt == 1
	}
	return cube.CodeOf(registryError(ctx, err)) == cube.CodeUnavailable
}

// countingFetcher reports how far each blob is and feeds the watchdog.
type countingFetcher struct {
	remotes.Fetcher
	at    func(offset int64)
	watch *watchdog
}

// Fetch implements remotes.Fetcher.
func (f *countingFetcher) Fetch(ctx context.Context, d ocispec.Descriptor) (io.ReadCloser, error) {
	r, err := f.Fetcher.Fetch(ctx, d)
	if err != nil {
		return nil, err
	}
	return &countingReader{ReadCloser: r, f: f}, nil
}

type countingReader struct {
	io.ReadCloser
	f      *countingFetcher
	offset int64
}

// Read implements io.Reader.
func (r *countingReader) Read(b []byte) (int, error) {
	n, err := r.ReadCloser.Read(b)
	r.offset += int64(n)
	r.f.watch.fed()
	if n > 0 {
		r.f.at(r.offset)
	}
	return n, err
}

// Seek implements io.Seeker: a pull that goes on begins with it.
func (r *countingReader) Seek(offset int64, whence int) (int64, error) {
	s, ok := r.ReadCloser.(io.Seeker)
	if !ok {
		return 0, errors.New("the registry's content cannot be read from the middle")
	}
	n, err := s.Seek(offset, whence)
	if err == nil {
		r.offset = n
	}
	return n, err
}

// watchdog cancels its context when it is not fed for a while.
type watchdog struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	timer  *time.Timer
}

func newWatchdog(ctx context.Context) *watchdog {
	w := &watchdog{}
	w.ctx, w.cancel = context.WithCancelCause(ctx)
	w.timer = time.AfterFunc(stallTimeout, func() { w.cancel(errStalled) })
	return w
}

func (w *watchdog) fed() { w.timer.Reset(stallTimeout) }

func (w *watchdog) stop() {
	w.timer.Stop()
	w.cancel(nil)
}

// registryError gives an error of a pull its code.
func registryError(ctx context.Context, err error) error {
	var known *cube.Error
	switch {
	case errors.As(err, &known):
		return err
	case ctx.Err() != nil:
		return errors.Join(context.Cause(ctx), err)
	case strings.Contains(err.Error(), syscall.ENOSPC.Error()): // containerd's errors are text
		return cube.Errorf(cube.CodeNoSpace, "%w", err)
	}
	if e := statusError(err); e != nil {
		return e
	}
	var (
		netErr net.Error
		urlErr *url.Error
	)
	switch {
	case strings.Contains(err.Error(), "byte manifest"): // no error value of its own
		return cube.Errorf(cube.CodeInvalid, "%w", err)
	case errdefs.IsNotFound(err):
		return cube.Errorf(cube.CodeNotFound, "%w", err)
	case errdefs.IsFailedPrecondition(err), errdefs.IsInvalidArgument(err), errdefs.IsNotImplemented(err):
		return cube.Errorf(cube.CodeInvalid, "%w", err)
	case strings.Contains(err.Error(), "HTTP response to HTTPS client"):
		return cube.Errorf(cube.CodeUnavailable, "%w", err).WithHint("the registry speaks plain HTTP, which must be allowed in the request")
	case errors.As(err, &urlErr), errors.As(err, &netErr), errors.Is(err, errStalled),
		errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF), errdefs.IsUnavailable(err):
		return cube.Errorf(cube.CodeUnavailable, "%w", err)
	}
	return err
}

// statusError classifies what the registry answered, nil when it did not.
func statusError(err error) error {
	const loginHint = "check the credentials of the registry in docker's config.json of the node"
	if errors.Is(err, docker.ErrInvalidAuthorization) {
		return cube.Errorf(cube.CodePermissionDenied, "%w", err).WithHint(loginHint)
	}
	var status remoteerrors.ErrUnexpectedStatus
	if !errors.As(err, &status) {
		return nil
	}
	switch status.StatusCode {
	case http.StatusUnauthorized, http.StatusForbidden:
		return cube.Errorf(cube.CodePermissionDenied, "%w", err).WithHint(loginHint)
	case http.StatusNotFound:
		return cube.Errorf(cube.CodeNotFound, "%w", err)
	}
	return cube.Errorf(cube.CodeUnavailable, "%w", err)
}

func hasStatus(err error, code int) bool {
	var status remoteerrors.ErrUnexpectedStatus
	return errors.As(err, &status) && status.StatusCode == code
}
