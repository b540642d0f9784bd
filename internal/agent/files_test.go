package agent

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"mime/multipart"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cubesandbox/cubelet/internal/agent/wire"
)

func TestSignatureIsE2Bs(t *testing.T) {
	const want = "v1_gUtH/s9YCJWgCizjfUxuWfhFE4QSydOWEIIvfLwDr6E"
	if got := signature("hello.txt", opRead, "user", "0tQG31xiMp0IOQfaz9dcwi72L1CPo8e0", ""); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// fileCall is one request to /files.
type fileCall struct {
	method, path string
	query        url.Values
	body         io.Reader
	header       map[string]string
}

func (f *fixture) files(t *testing.T, c fileCall) (int, http.Header, string) {
	t.Helper()
	if c.query == nil {
		c.query = url.Values{}
	}
	if c.path != "" {
		c.query.Set("path", c.path)
	}
	req, err := http.NewRequestWithContext(t.Context(), c.method, f.url+"/files?"+c.query.Encode(), c.body)
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range c.header {
		req.Header.Set(k, v)
	}
	res, err := f.http.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, res.Header, string(b)
}

func octets(extra ...string) map[string]string {
	h := map[string]string{"Content-Type": "application/octet-stream"}
	for i := 0; i+1 < len(extra); i += 2 {
		h[extra[i]] = extra[i+1]
	}
	return h
}

func TestLargeUploadsArriveWholeAndAreStreamed(t *testing.T) {
	f := newFixture(t, Config{})
	const size = 80 << 20
	path := filepath.Join(t.TempDir(), "a", "b", "large")
	sent := sha256.New()
	src := rand.NewChaCha8([32]byte{1})
	status, _, body := f.files(t, fileCall{
		method: http.MethodPost, path: path, header: octets(), query: url.Values{"username": {"nobody"}},
		body: io.TeeReader(io.LimitReader(src, size), sent),
	})
	if status != http.StatusOK || body != fmt.Sprintf(`[{"path":%q,"name":"large","type":"file"}]`, path) {
		t.Fatalf("%d %s", status, body)
	}
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	got := sha256.New()
	if n, err := io.Copy(got, file); err != nil || n != size || !bytes.Equal(got.Sum(nil), sent.Sum(nil)) {
		t.Errorf("%d bytes on disk, digest equal: %v, %v", n, bytes.Equal(got.Sum(nil), sent.Sum(nil)), err)
	}
	for _, p := range []string{path, filepath.Dir(path)} {
		var st syscall.Stat_t
		if err := syscall.Stat(p, &st); err != nil || st.Uid != 65534 || st.Gid != 65534 {
			t.Errorf("%s belongs to %d:%d, %v", p, st.Uid, st.Gid, err)
		}
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, f.url+"/files?path="+url.QueryEscape(path), nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := f.http.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	down := sha256.New()
	if _, err := io.Copy(down, res.Body); err != nil || !bytes.Equal(down.Sum(nil), sent.Sum(nil)) {
		t.Errorf("the download differs: %v", err)
	}
}

func TestInterruptedUploadLeavesTheOldFile(t *testing.T) {
	f := newFixture(t, Config{})
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	if err := os.WriteFile(path, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.url+"/files?path="+url.QueryEscape(path), r)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/octet-stream")
	done := make(chan error, 1)
	go func() {
		res, err := f.http.Do(req)
		if err == nil {
			res.Body.Close()
			err = fmt.Errorf("status %d", res.StatusCode)
		}
		done <- err
	}()
	if _, err := w.Write(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	cancel()
	_ = w.CloseWithError(io.ErrClosedPipe) // a client that waits for more to send
	if err := <-done; !errors.Is(err, context.Canceled) && !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("the upload reported %v", err)
	}
	waitFor(t, func() error {
		entries, err := os.ReadDir(dir)
		if err == nil && len(entries) != 1 {
			err = fmt.Errorf("left behind: %v", entries)
		}
		return err
	})
	if b, err := os.ReadFile(path); err != nil || string(b) != "old" {
		t.Errorf("the file is %q, %v", b, err)
	}
}

func TestUploadsInEveryForm(t *testing.T) {
	f := newFixture(t, Config{})
	dir := t.TempDir()
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	_, _ = z.Write([]byte("unzipped"))
	_ = z.Close()
	path := filepath.Join(dir, "z")
	if status, _, body := f.files(t, fileCall{method: http.MethodPost, path: path, body: &zipped, header: octets("Content-Encoding", "gzip")}); status != 200 {
		t.Fatalf("gzip: %d %s", status, body)
	}
	wantFile(t, path, "unzipped")

	var form bytes.Buffer
	m := multipart.NewWriter(&form)
	for name, text := range map[string]string{"one/x": "1", "two/y": "2"} {
		h := map[string][]string{"Content-Disposition": {fmt.Sprintf(`form-data; name="file"; filename=%q`, filepath.Join(dir, name))}}
		part, err := m.CreatePart(h)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = part.Write([]byte(text))
	}
	_ = m.WriteField("other", "ignored")
	_ = m.Close()
	status, _, body := f.files(t, fileCall{method: http.MethodPost, body: &form, header: map[string]string{"Content-Type": m.FormDataContentType()}})
	var list []uploaded
	if err := json.Unmarshal([]byte(body), &list); err != nil || status != 200 || len(list) != 2 {
		t.Fatalf("multipart: %d %s", status, body)
	}
	wantFile(t, filepath.Join(dir, "one/x"), "1")
	wantFile(t, filepath.Join(dir, "two/y"), "2")

	link := filepath.Join(dir, "link")
	if err := os.Symlink("z", link); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, 0o751); err != nil {
		t.Fatal(err)
	}
	if status, _, body := f.files(t, fileCall{method: http.MethodPost, path: link, body: strings.NewReader("new"), header: octets()}); status != 200 {
		t.Fatalf("through a link: %d %s", status, body)
	}
	wantFile(t, path, "new")
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o751 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
}

func wantFile(t *testing.T, path, want string) {
	t.Helper()
	if b, err := os.ReadFile(path); err != nil || string(b) != want {
		t.Errorf("%s holds %q, %v", path, b, err)
	}
}

func TestFileMistakesHaveTheirStatus(t *testing.T) {
	f := newFixture(t, Config{})
	dir := t.TempDir()
	if err := os.Symlink("loop", filepath.Join(dir, "loop")); err != nil {
		t.Fatal(err)
	}
	small := filepath.Join(dir, "small")
	if err := os.Mkdir(small, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("tmpfs", small, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	defer syscall.Unmount(small, 0)
	post := func(path string, n int, header map[string]string) fileCall {
		return fileCall{method: http.MethodPost, path: path, body: bytes.NewReader(make([]byte, n)), header: header}
	}
	get := func(path, key, value string) fileCall {
		return fileCall{method: http.MethodGet, path: path, header: map[string]string{key: value}}
	}
	for name, c := range map[string]struct {
		call fileCall
		want int
	}{
		"missing":          {get(dir+"/none", "Accept", "*/*"), 404},
		"directory":        {get(dir, "Accept", "*/*"), 400},
		"link loop":        {get(dir+"/loop", "Accept", "*/*"), 400},
		"no user":          {fileCall{method: http.MethodGet, path: dir, query: url.Values{"username": {"no-one"}}}, 401},
		"encoding":         {get("/etc/passwd", "Accept-Encoding", "br, identity;q=0"), 406},
		"onto a directory": {post(dir, 1, octets()), 400},
		"below a file":     {post("/etc/passwd/x", 1, octets()), 400},
		"no path":          {post("", 1, octets()), 400},
		"content type":     {post(dir+"/x", 1, map[string]string{"Content-Type": "text/plain"}), 400},
		"bad gzip":         {post(dir+"/x", 1, octets("Content-Encoding", "gzip")), 400},
		"bad metadata":     {post(dir+"/x", 1, octets("X-Metadata-A", "\u00e9")), 400},
		"no space":         {post(small+"/x", 2<<20, octets()), 507},
		"method":           {fileCall{method: http.MethodPut, path: dir}, 405},
	} {
		status, _, body := f.files(t, c.call)
		var e struct {
			Code    int
			Message string
		}
		if err := json.Unmarshal([]byte(body), &e); err != nil || status != c.want || e.Code != c.want || e.Message == "" {
			t.Errorf("%s: %d %s, want %d", name, status, body, c.want)
		}
	}
	if entries, err := os.ReadDir(small); err != nil || len(entries) != 0 {
		t.Errorf("a failed upload left %v, %v", entries, err)
	}
}

func TestDownloadsHonourRangesConditionsAndEncodings(t *testing.T) {
	f := newFixture(t, Config{})
	path := filepath.Join(t.TempDir(), "d\u00e9j\u00e0 vu.txt")
	if err := os.WriteFile(path, []byte("0123456789"), 0o644); err != nil {
		t.Fatal(err)
	}
	get := func(kv ...string) (int, http.Header, string) {
		c := fileCall{method: http.MethodGet, path: path, header: map[string]string{}}
		for i := 0; i < len(kv); i += 2 {
			c.header[kv[i]] = kv[i+1]
		}
		return f.files(t, c)
	}
	status, h, body := get()
	if status != 200 || body != "0123456789" || h.Get("Vary") != "Accept-Encoding" || !strings.HasPrefix(h.Get("Content-Disposition"), "inline; filename") {
		t.Errorf("whole: %d %v %q", status, h, body)
	}
	if status, h, body = get("Range", "bytes=2-4", "Accept-Encoding", "gzip"); status != 206 || body != "234" || h.Get("Content-Encoding") != "" {
		t.Errorf("range: %d %v %q", status, h, body)
	}
	if status, _, _ = get("If-Modified-Since", time.Now().Add(time.Hour).UTC().Format(http.TimeFormat)); status != 304 {
		t.Errorf("condition: %d", status)
	}
	status, h, body = get("Accept-Encoding", "gzip, deflate")
	z, err := gzip.NewReader(strings.NewReader(body))
	if err != nil || status != 200 || h.Get("Content-Encoding") != "gzip" {
		t.Fatalf("gzip: %d %v %v", status, h, err)
	}
	if b, err := io.ReadAll(z); err != nil || string(b) != "0123456789" {
		t.Errorf("gzip: %q %v", b, err)
	}
	if status, _, body := f.files(t, fileCall{method: http.MethodGet, path: "/proc/version"}); status != 200 || !strings.HasPrefix(body, "Linux") {
		t.Errorf("/proc: %d %q", status, body)
	}
}

func TestMetadataTravelsWithTheFile(t *testing.T) {
	f := newFixture(t, Config{})
	path := filepath.Join(t.TempDir(), "m")
	status, _, body := f.files(t, fileCall{method: http.MethodPost, path: path, body: strings.NewReader("x"), header: octets("X-Metadata-Owner-Id", "42")})
	if status != 200 || !strings.Contains(body, `"metadata":{"owner-id":"42"}`) {
		t.Fatalf("%d %s", status, body)
	}
	if got := readMetadata(path); len(got) != 1 || got["owner-id"] != "42" {
		t.Errorf("metadata %v", got)
	}
	if status, _, _ := f.files(t, fileCall{method: http.MethodPost, path: path, body: strings.NewReader("y"), header: octets()}); status != 200 {
		t.Fatal(status)
	}
	if got := readMetadata(path); got != nil {
		t.Errorf("metadata survived a new upload: %v", got)
	}
}

func TestFilesNeedTheTokenOrASignature(t *testing.T) {
	f := newFixture(t, Config{})
	const token = "secret"
	if err := f.init(&wire.Init{Token: token}); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(path, []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	signed := func(op, expiration string) url.Values {
		q := url.Values{"signature": {signature(path, op, "", token, expiration)}}
		if expiration != "" {
			q.Set("signature_expiration", expiration)
		}
		return q
	}
	future, past := fmt.Sprint(time.Now().Unix()+60), fmt.Sprint(time.Now().Unix()-60)
	for name, c := range map[string]struct {
		query  url.Values
		header string
		want   int
	}{
		"nothing":         {nil, "", 401},
		"token":           {nil, token, 200},
		"wrong token":     {signed(opRead, ""), "other", 401},
		"signature":       {signed(opRead, ""), "", 200},
		"other operation": {signed(opWrite, ""), "", 401},
		"not expired":     {signed(opRead, future), "", 200},
		"expired":         {signed(opRead, past), "", 401},
	} {
		call := fileCall{method: http.MethodGet, path: path, query: c.query}
		if c.header != "" {
			call.header = map[string]string{tokenHeader: c.header}
		}
		status, _, body := f.files(t, call)
		if status != c.want {
			t.Errorf("%s: %d %s", name, status, body)
		}
		if name == "expired" && body != `{"code":401,"message":"signature is already expired"}` {
			t.Errorf("expired: %s", body)
		}
	}
}
