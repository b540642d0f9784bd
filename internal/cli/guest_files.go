package cli

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
	"github.com/cubesandbox/cubelet/api/envd/filesystem"
	"github.com/cubesandbox/cubelet/api/envd/filesystem/filesystemconnect"
)

// errorBytes bounds how much of an error's body is read.
const errorBytes = 64 << 10

// guestFiles is the file system of one guest, seen through the node.
type guestFiles struct {
	http *http.Client
	base string // of the guest, for example http://cubelet/guest/s3k2
	user string
	fs   filesystemconnect.FilesystemClient
}

func newGuestFiles(c *client, sandbox, user string) *guestFiles {
	base := c.base + "/guest/" + url.PathEscape(sandbox)
	return &guestFiles{
		http: c.http,
		base: base,
		user: user,
		fs:   filesystemconnect.NewFilesystemClient(c.http, base, connect.WithProtoJSON(), connect.WithAcceptCompression("gzip", nil, nil)),
	}
}

// call prepares a request that acts as the user.
func call[T any](g *guestFiles, m *T) *connect.Request[T] {
	req := connect.NewRequest(m)
	if g.user != "" {
		r := http.Request{Header: req.Header()}
		r.SetBasicAuth(g.user, "")
	}
	return req
}

// stat describes a path; nil when it does not exist.
func (g *guestFiles) stat(ctx context.Context, path string) (*filesystem.EntryInfo, error) {
	res, err := g.fs.Stat(ctx, call(g, &filesystem.StatRequest{Path: path}))
	if connect.CodeOf(err) == connect.CodeNotFound && !fromNode(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return res.Msg.GetEntry(), nil
}

// fromNode reports whether the node made the error, not the guest: only the node adds
// its detail.
func fromNode(err error) bool {
	var remote *connect.Error
	return errors.As(err, &remote) && detail(remote) != nil
}

func (g *guestFiles) list(ctx context.Context, path string) ([]*filesystem.EntryInfo, error) {
	res, err := g.fs.ListDir(ctx, call(g, &filesystem.ListDirRequest{Path: path, Depth: 1}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetEntries(), nil
}

// makeDir makes a directory and its parents; one that exists is fine.
func (g *guestFiles) makeDir(ctx context.Context, path string) error {
	_, err := g.fs.MakeDir(ctx, call(g, &filesystem.MakeDirRequest{Path: path}))
	if connect.CodeOf(err) == connect.CodeAlreadyExists {
		return nil
	}
	return err
}

// read opens a file. The caller closes the body. The size is -1 when it is unknown.
func (g *guestFiles) read(ctx context.Context, path string) (body io.ReadCloser, size int64, err error) {
	res, err := g.do(ctx, http.MethodGet, path, nil)
	if err != nil {
		return nil, 0, err
	}
	return res.Body, res.ContentLength, nil
}

// write stores what r holds as a file; parents are made.
func (g *guestFiles) write(ctx context.Context, path string, r io.Reader) error {
	res, err := g.do(ctx, http.MethodPost, path, r)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, io.LimitReader(res.Body, errorBytes))
	return errors.Join(err, res.Body.Close())
}

func (g *guestFiles) do(ctx context.Context, method, path string, body io.Reader) (*http.Response, error) {
	q := url.Values{"path": {path}}
	if g.user != "" {
		q.Set("username", g.user)
	}
	req, err := http.NewRequestWithContext(ctx, method, g.base+"/files?"+q.Encode(), body)
	if err != nil {
		return nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/octet-stream")
	}
	res, err := g.http.Do(req)
	if err != nil {
		return nil, err
	}
	if res.StatusCode == http.StatusOK {
		return res, nil
	}
	defer res.Body.Close()
	return nil, fileError(res)
}

// fileError reads an error that is either the guest's {code: number, message} or the
// node's {code: name, message, details}.
func fileError(res *http.Response) error {
	var e struct {
		Code    any    `json:"code"`
		Message string `json:"message"`
		Details []struct {
			Type  string `json:"type"`
			Value string `json:"value"`
		} `json:"details"`
	}
	text, err := io.ReadAll(io.LimitReader(res.Body, errorBytes))
	if err != nil {
		return err
	}
	if json.Unmarshal(text, &e) != nil || e.Message == "" {
		e.Message = "the answer was " + res.Status
	}
	code := codeOfStatus(res.StatusCode)
	if name, ok := e.Code.(string); ok {
		_ = code.UnmarshalText([]byte(name)) // an unknown name leaves the status' code
	}
	out := connect.NewError(code, errors.New(e.Message))
	for _, d := range e.Details {
		var m cubev1.ErrorDetail
		b, err := base64.RawStdEncoding.DecodeString(d.Value)
		if err != nil || d.Type != string(m.ProtoReflect().Descriptor().FullName()) || proto.Unmarshal(b, &m) != nil {
			continue
		}
		if detail, err := connect.NewErrorDetail(&m); err == nil {
			out.AddDetail(detail)
		}
	}
	return out
}

func codeOfStatus(status int) connect.Code {
	switch status {
	case http.StatusBadRequest, http.StatusNotAcceptable:
		return connect.CodeInvalidArgument
	case http.StatusUnauthorized:
		return connect.CodeUnauthenticated
	case http.StatusNotFound:
		return connect.CodeNotFound
	case http.StatusInsufficientStorage:
		return connect.CodeResourceExhausted
	case http.StatusBadGateway, http.StatusServiceUnavailable:
		return connect.CodeUnavailable
	}
	return connect.CodeInternal
}
