package image_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	cube "github.com/cubesandbox/cubelet"
	containerdserver "github.com/cubesandbox/cubelet/internal/containerd"
	"github.com/cubesandbox/cubelet/internal/image"
	"github.com/cubesandbox/cubelet/internal/testenv"
	"github.com/cubesandbox/cubelet/internal/tplimage"
)

// repo is a registry that a test can break.
type repo struct {
	*httptest.Server
	t    *testing.T
	next http.Handler

	mu     sync.Mutex
	served int64           // bytes of blobs
	ranges int             // requests for parts of blobs
	cut    int64           // bytes of blobs until the registry breaks down, 0: never
	status int             // answer to everything, 0: none
	user   string          // user:password that is asked for
	forge  map[string]bool // blobs with other content
	whole  bool            // parts of blobs are refused
	blobs  blobs
}

func newRepo(t *testing.T) *repo {
	t.Helper()
	r := &repo{t: t, next: registry.New(registry.Logger(log.New(io.Discard, "", 0))), forge: map[string]bool{}, blobs: blobs{}}
	r.Server = httptest.NewServer(r)
	t.Cleanup(r.Close)
	return r
}

func (r *repo) host() string { return strings.TrimPrefix(r.URL, "http://") }

// ServeHTTP implements http.Handler.
func (r *repo) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	r.mu.Lock()
	status, user, forged := r.status, r.user, r.forge[filepath.Base(req.URL.Path)]
	content := r.blobs[digest.Digest(filepath.Base(req.URL.Path))]
	part := req.Header.Get("Range") != ""
	if part {
		r.ranges++
	}
	refused := part && r.whole
	broken := r.cut > 0 && r.served >= r.cut
	r.mu.Unlock()
	name, password, _ := req.BasicAuth()
	blob := req.Method == http.MethodGet && strings.Contains(req.URL.Path, "/blobs/")
	switch {
	case status != 0:
		http.Error(w, "broken", status)
	case user != "" && name+":"+password != user:
		w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
		http.Error(w, `{"errors":[{"code":"UNAUTHORIZED","message":"who are you?"}]}`, http.StatusUnauthorized)
	case blob && broken:
		http.Error(w, "broken", http.StatusServiceUnavailable)
	case blob && forged:
		r.next.ServeHTTP(&forger{ResponseWriter: w}, req)
	case blob && refused:
		http.Error(w, "no parts", http.StatusRequestedRangeNotSatisfiable)
	case blob:
		http.ServeContent(&counter{ResponseWriter: w, r: r}, req, "", time.Time{}, bytes.NewReader(content))
	default:
		r.next.ServeHTTP(w, req)
	}
}

type counter struct {
	http.ResponseWriter
	r *repo
}

// Write counts and, where the registry breaks down, cuts the connection.
func (c *counter) Write(b []byte) (int, error) {
	c.r.mu.Lock()
	left := int64(len(b))
	if c.r.cut > 0 {
		left = min(left, max(0, c.r.cut-c.r.served))
	}
	c.r.served += left
	c.r.mu.Unlock()
	n, err := c.ResponseWriter.Write(b[:left])
	if err == nil && n < len(b) {
		panic(http.ErrAbortHandler)
	}
	return n, err
}

type forger struct{ http.ResponseWriter }

// Write changes every byte.
func (f *forger) Write(b []byte) (int, error) {
	b = bytes.Clone(b)
	for i := range b {
		b[i] ^= 1
	}
	return f.ResponseWriter.Write(b)
}

func (r *repo) set(change func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	change()
}

// push stores blobs and tags the manifest; others are manifests that it names.
func (r *repo) push(b blobs, ref string, manifest ocispec.Descriptor, others ...ocispec.Descriptor) string {
	r.t.Helper()
	name, tag, _ := strings.Cut(ref, ":")
	for d, content := range b {
		r.set(func() { r.blobs[d] = content })
		r.put(fmt.Sprintf("/v2/%s/blobs/uploads/?digest=%s", name, d), http.MethodPost, "", content)
	}
	for _, m := range others {
		r.put(fmt.Sprintf("/v2/%s/manifests/%s", name, m.Digest), http.MethodPut, m.MediaType, b[m.Digest])
	}
	r.put(fmt.Sprintf("/v2/%s/manifests/%s", name, tag), http.MethodPut, manifest.MediaType, b[manifest.Digest])
	return r.host() + "/" + ref
}

func (r *repo) put(path, method, mediaType string, content []byte) {
	r.t.Helper()
	req := httptest.NewRequest(method, path, bytes.NewReader(content))
	req.Header.Set("Content-Type", mediaType)
	w := httptest.NewRecorder()
	r.next.ServeHTTP(w, req)
	if w.Code/100 != 2 {
		r.t.Fatalf("%s %s: %d %s", method, path, w.Code, w.Body)
	}
}

// startContainerd runs a containerd for the test.
func startContainerd(t *testing.T) *containerd.Client {
	t.Helper()
	testenv.RequireRoot(t)
	shim := testenv.Binary(t, "containerd-shim-runc-v2")
	root := testenv.TempRoot(t)
	s, err := containerdserver.Start(context.Background(), containerdserver.Config{
		Root: filepath.Join(root, "c"), State: filepath.Join(root, "s"), Address: filepath.Join(root, "c.sock"),
		ShimSocketDir: filepath.Join(root, "h"), LibexecDir: filepath.Dir(shim), Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	c, err := s.Client("images")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// kept lists what containerd keeps: blobs, unfinished blobs and leases.
func kept(t *testing.T, c *containerd.Client) (found []string) {
	t.Helper()
	ctx := context.Background()
	err := c.ContentStore().Walk(ctx, func(i content.Info) error {
		found = append(found, i.Digest.String())
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	status, err := c.ContentStore().ListStatuses(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range status {
		found = append(found, fmt.Sprintf("%s at %d", s.Ref, s.Offset))
	}
	all, err := c.LeasesService().List(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range all {
		found = append(found, "lease "+l.ID)
	}
	return found
}

func dropLeases(t *testing.T, c *containerd.Client) {
	t.Helper()
	all, err := c.LeasesService().List(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range all {
		if err := c.LeasesService().Delete(context.Background(), l, leases.SynchronousDelete); err != nil {
			t.Fatal(err)
		}
	}
}

// pulls is a store with its containerd.
type pulls struct {
	*testing.T
	client *containerd.Client
}

func (p pulls) build(t *testing.T, ref string, change ...func(*image.Config)) (string, tplimage.Root, error) {
	t.Helper()
	c := image.Config{Client: p.client, DockerConfig: filepath.Join(t.TempDir(), "none.json")}
	for _, f := range change {
		f(&c)
	}
	path := filepath.Join(t.TempDir(), "root.erofs")
	var last int64
	root, err := newStore(t, c).Build(context.Background(), tplimage.Source{Image: ref}, path, func(stage string, done, total int64) {
		if stage != "pull" {
			return
		}
		if done < last || done > total {
			t.Errorf("progress went from %d to %d of %d", last, done, total)
		}
		last = done
	})
	return path, root, err
}

// empty fails when containerd keeps anything.
func (p pulls) empty(t *testing.T) {
	t.Helper()
	if left := kept(t, p.client); len(left) > 0 {
		t.Errorf("containerd keeps %v", left)
	}
}

func TestPull(t *testing.T) {
	p := pulls{t, startContainerd(t)}
	for name, test := range map[string]func(*testing.T){
		"image": p.wholeImage, "index": p.index, "credentials": p.credentials, "answers": p.answers,
		"interrupted": p.interrupted, "wrong content": p.wrongContent, "references": p.references,
	} {
		t.Run(name, test)
	}
}

func (p pulls) wholeImage(t *testing.T) {
	r := newRepo(t)
	b := blobs{}
	l := layer(t, file("f", "content"))
	m := testImage{layers: [][]byte{l, l, layer(t, file("g", "more"))}, config: ocispec.ImageConfig{User: "app"}}.addTo(b)
	ref := r.push(b, "team/app:1.0", m)
	for _, ref := range []string{ref, r.host() + "/team/app@" + m.Digest.String()} {
		disk, root, err := p.build(t, ref)
		if err != nil {
			t.Fatal(err)
		}
		if root.Digest != m.Digest.String() || root.Ref != ref || root.Config.User != "app" {
			t.Errorf("got %+v", root)
		}
		if got, err := os.ReadFile(filepath.Join(mount(t, disk), "g")); err != nil || string(got) != "more" {
			t.Errorf("g: %q, %v", got, err)
		}
		p.empty(t)
	}
}

func (p pulls) index(t *testing.T) {
	r := newRepo(t)
	b := blobs{}
	plat := func(arch string) ocispec.Descriptor {
		pl := ocispec.Platform{OS: "linux", Architecture: arch}
		d := testImage{platform: pl, layers: [][]byte{layer(t, file(arch, ""))}}.addTo(b)
		d.Platform = &pl
		return d
	}
	arm, amd := plat("arm64"), plat("amd64")
	idx := b.addJSON("application/vnd.docker.distribution.manifest.list.v2+json", index(arm, amd))
	_, root, err := p.build(t, r.push(b, "app:latest", idx, arm, amd))
	if err != nil || root.Digest != amd.Digest.String() {
		t.Errorf("%+v, %v", root, err)
	}
	_, _, err = p.build(t, r.push(b, "arm:latest", arm))
	wantError(t, err, cube.CodeInvalid, "linux/arm64", "linux/amd64")
	p.empty(t)
}

func (p pulls) credentials(t *testing.T) {
	r := newRepo(t)
	b := blobs{}
	ref := r.push(b, "app:1", testImage{layers: [][]byte{layer(t, file("f", ""))}}.addTo(b))
	r.set(func() { r.user = "me:secret" })
	config := func(text string) func(*image.Config) {
		path := filepath.Join(t.TempDir(), "config.json")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return func(c *image.Config) { c.DockerConfig = path }
	}
	auth := func(user string) string { return base64.StdEncoding.EncodeToString([]byte(user)) }
	helper := filepath.Join(t.TempDir(), "docker-credential-test")
	script := "#!/bin/sh\nread host\n[ \"$host\" = " + r.host() + " ] || { echo credentials not found in native keychain; exit 1; }\necho '{\"Username\":\"me\",\"Secret\":\"secret\"}'\n"
	if err := os.WriteFile(helper, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", filepath.Dir(helper)+":"+os.Getenv("PATH"))

	for name, text := range map[string]string{
		"auth":     fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, r.host(), auth("me:secret")),
		"url":      fmt.Sprintf(`{"auths":{"http://%s/v2/":{"auth":%q}}}`, r.host(), auth("me:secret")),
		"password": fmt.Sprintf(`{"auths":{%q:{"username":"me","password":"secret"}}}`, r.host()),
		"helper":   fmt.Sprintf(`{"credHelpers":{%q:"test"}}`, r.host()),
		"store":    `{"credsStore":"test"}`,
	} {
		if _, _, err := p.build(t, ref, config(text)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, c := range map[string]struct {
		text string
		code cube.Code
	}{
		"none":        {"{}", cube.CodePermissionDenied},
		"wrong":       {fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, r.host(), auth("me:wrong")), cube.CodePermissionDenied},
		"other host":  {fmt.Sprintf(`{"auths":{"registry.test":{"auth":%q}}}`, auth("me:secret")), cube.CodePermissionDenied},
		"broken":      {`{`, cube.CodeFailedPrecondition},
		"no base64":   {fmt.Sprintf(`{"auths":{%q:{"auth":"?"}}}`, r.host()), cube.CodeFailedPrecondition},
		"helper name": {`{"credsStore":"../../evil"}`, cube.CodeFailedPrecondition},
		"no helper":   {`{"credsStore":"absent"}`, cube.CodeFailedPrecondition},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := p.build(t, ref, config(c.text))
			wantError(t, err, c.code)
			if strings.Contains(err.Error(), "secret") {
				t.Errorf("%v tells the password", err)
			}
		})
	}
	p.empty(t)
}

func (p pulls) answers(t *testing.T) {
	r := newRepo(t)
	_, _, err := p.build(t, r.host()+"/missing:1")
	wantError(t, err, cube.CodeNotFound)
	p.empty(t)
	for status, code := range map[int]cube.Code{500: cube.CodeUnavailable, 429: cube.CodeUnavailable, 403: cube.CodePermissionDenied} {
		r.set(func() { r.status = status })
		_, _, err := p.build(t, r.host()+"/app:1")
		wantError(t, err, code)
		dropLeases(t, p.client)
	}
	r.Close()
	_, _, err = p.build(t, r.host()+"/app:1")
	wantError(t, err, cube.CodeUnavailable)
	dropLeases(t, p.client)
	p.empty(t)
}

func (p pulls) interrupted(t *testing.T) {
	t.Run("goes on", func(t *testing.T) { p.interruptedPull(t, false) })
	t.Run("without parts", func(t *testing.T) { p.interruptedPull(t, true) })
}

// interruptedPull breaks the registry in the middle of a blob, and mends it.
func (p pulls) interruptedPull(t *testing.T, whole bool) {
	r := newRepo(t)
	b := blobs{}
	big := make([]byte, 8<<20)
	if _, err := io.ReadFull(devRandom(t), big); err != nil {
		t.Fatal(err)
	}
	m := testImage{layers: [][]byte{layer(t, file("big", string(big)))}, pack: bytes.Clone}.addTo(b)
	ref := r.push(b, "app:1", m)
	r.set(func() { r.cut = 5 << 20 })
	_, _, err := p.build(t, ref)
	wantError(t, err, cube.CodeUnavailable)
	if len(kept(t, p.client)) == 0 {
		t.Error("nothing is kept of the interrupted pull")
	}
	var before int64
	r.set(func() { r.cut, before, r.whole = 0, r.served, whole })
	disk, _, err := p.build(t, ref)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(mount(t, disk), "big")); err != nil || !bytes.Equal(got, big) {
		t.Errorf("the content differs, %v", err)
	}
	if again := r.served - before; !whole && (again > 5<<20 || r.ranges == 0) {
		t.Errorf("the second pull fetched %d bytes in %d parts", again, r.ranges)
	}
	dropLeases(t, p.client)
	p.empty(t)
}

func (p pulls) wrongContent(t *testing.T) {
	r := newRepo(t)
	b := blobs{}
	l := gz(layer(t, file("f", "content")))
	m := testImage{layers: [][]byte{layer(t, file("f", "content"))}}.addTo(b)
	ref := r.push(b, "app:1", m)
	r.set(func() { r.forge[digest.FromBytes(l).String()] = true })
	_, _, err := p.build(t, ref)
	wantError(t, err, cube.CodeInvalid, digest.FromBytes(l).String())
	p.empty(t)
	r.set(func() { clear(r.forge) })
	if _, _, err := p.build(t, ref); err != nil {
		t.Errorf("what was wrong is still there: %v", err)
	}
	huge := b.add(ocispec.MediaTypeImageManifest, append(bytes.Repeat([]byte(" "), 5<<20), b[m.Digest]...))
	_, _, err = p.build(t, r.push(b, "huge:1", huge))
	wantError(t, err, cube.CodeInvalid)
	p.empty(t)
}

func (p pulls) references(t *testing.T) {
	for _, ref := range []string{"UPPER/case", "host/../../x", "a b", "app:tag/../x", "app@sha256:short", strings.Repeat("a", 300)} {
		_, _, err := p.build(t, ref)
		wantError(t, err, cube.CodeInvalid)
	}
	_, err := newStore(t, image.Config{}).Fetch(context.Background(), tplimage.Source{Image: "registry.test/app"}, nil)
	wantError(t, err, cube.CodeFailedPrecondition)
	for _, src := range []tplimage.Source{{}, {Image: "a", ArchivePath: "/b"}} {
		_, err := newStore(t, image.Config{}).Fetch(context.Background(), src, nil)
		wantError(t, err, cube.CodeInvalid)
	}
	p.empty(t)
}
