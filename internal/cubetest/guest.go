package cubetest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/cubesandbox/cubelet/api/envd/filesystem"
	"github.com/cubesandbox/cubelet/api/envd/filesystem/filesystemconnect"
)

// guestServer answers for the agents of all sandboxes: the access token tells whose it is.
type guestServer struct {
	*httptest.Server
	n *Node
}

func newGuestServer(n *Node) *guestServer {
	g := &guestServer{n: n}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /files", g.download)
	mux.HandleFunc("POST /files", g.upload)
	mux.Handle(filesystemconnect.NewFilesystemHandler(&guestFiles{n: n}))
	mux.HandleFunc("/init", func(http.ResponseWriter, *http.Request) { n.t.Error("somebody reached /init") })
	g.Server = httptest.NewServer(mux)
	return g
}

func (g *guestServer) dial(ctx context.Context, _ *sandbox) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "tcp", g.Listener.Addr().String())
}

// dirOf returns the files of the sandbox whose token the request carries.
func (n *Node) dirOf(h http.Header) (string, bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, sb := range n.sandboxes {
		if sb.token == h.Get("X-Access-Token") {
			return n.GuestDir(sb.ID), true
		}
	}
	return "", false
}

func (g *guestServer) path(w http.ResponseWriter, r *http.Request) (string, bool) {
	dir, ok := g.n.dirOf(r.Header)
	if !ok {
		guestError(w, http.StatusUnauthorized, "bad token")
		return "", false
	}
	return filepath.Join(dir, filepath.Clean("/"+r.URL.Query().Get("path"))), true
}

func (g *guestServer) download(w http.ResponseWriter, r *http.Request) {
	path, ok := g.path(w, r)
	if !ok {
		return
	}
	f, err := os.Open(path)
	if err != nil {
		guestError(w, http.StatusNotFound, "file '"+r.URL.Query().Get("path")+"' does not exist")
		return
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil || st.IsDir() {
		guestError(w, http.StatusBadRequest, "path is a directory")
		return
	}
	w.Header().Set("Set-Cookie", "guest=1")
	w.Header().Set("Content-Type", "application/octet-stream")
	http.ServeContent(w, r, "", st.ModTime(), f)
}

func (g *guestServer) upload(w http.ResponseWriter, r *http.Request) {
	path, ok := g.path(w, r)
	if !ok {
		return
	}
	if st, err := os.Stat(path); err == nil && st.IsDir() {
		guestError(w, http.StatusBadRequest, "path is a directory")
		return
	}
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	if err == nil {
		err = store(path, r.Body)
	}
	if err != nil {
		guestError(w, http.StatusInternalServerError, err.Error())
		return
	}
	_ = json.NewEncoder(w).Encode([]map[string]string{{"path": path, "type": "file"}})
}

func store(path string, body io.Reader) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, body)
	return errors.Join(err, f.Close())
}

// guestError answers as envd does.
func guestError(w http.ResponseWriter, code int, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(map[string]any{"code": code, "message": message})
}

// guestFiles implements filesystemconnect.FilesystemHandler.
type guestFiles struct {
	filesystemconnect.UnimplementedFilesystemHandler
	n *Node
}

func (g *guestFiles) Stat(_ context.Context, req *connect.Request[filesystem.StatRequest]) (*connect.Response[filesystem.StatResponse], error) {
	e, err := g.entry(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&filesystem.StatResponse{Entry: e}), nil
}

func (g *guestFiles) MakeDir(_ context.Context, req *connect.Request[filesystem.MakeDirRequest]) (*connect.Response[filesystem.MakeDirResponse], error) {
	dir, ok := g.n.dirOf(req.Header())
	if !ok {
		return nil, connect.NewError(connect.CodeUnauthenticated, errors.New("bad token"))
	}
	path := filepath.Join(dir, filepath.Clean("/"+req.Msg.GetPath()))
	if st, err := os.Stat(path); err == nil && st.IsDir() {
		return nil, connect.NewError(connect.CodeAlreadyExists, fmt.Errorf("directory already exists: %s", path))
	}
	if err := os.MkdirAll(path, 0o755); err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	e, err := g.entry(req.Header(), req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&filesystem.MakeDirResponse{Entry: e}), nil
}

func (g *guestFiles) ListDir(_ context.Context, req *connect.Request[filesystem.ListDirRequest]) (*connect.Response[filesystem.ListDirResponse], error) {
	dir, ok := g.n.dirOf(req.Header())
	if !ok {
		return nil, connect.NewError(connect.CodeUnauthenticated, errors.New("bad token"))
	}
	list, err := os.ReadDir(filepath.Join(dir, filepath.Clean("/"+req.Msg.GetPath())))
	if err != nil {
		return nil, connect.NewError(connect.CodeNotFound, err)
	}
	out := &filesystem.ListDirResponse{}
	for _, d := range list {
		e, err := g.entry(req.Header(), strings.TrimSuffix(req.Msg.GetPath(), "/")+"/"+d.Name())
		if err != nil {
			return nil, err
		}
		out.Entries = append(out.Entries, e)
	}
	return connect.NewResponse(out), nil
}

func (g *guestFiles) entry(h http.Header, path string) (*filesystem.EntryInfo, error) {
	dir, ok := g.n.dirOf(h)
	if !ok {
		return nil, connect.NewError(connect.CodeUnauthenticated, errors.New("bad token"))
	}
	full := filepath.Join(dir, filepath.Clean("/"+path))
	st, err := os.Lstat(full)
	if err != nil {
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("file not found: %s", path))
	}
	e := &filesystem.EntryInfo{
		Name: filepath.Base(path), Path: filepath.Clean("/" + path), Size: st.Size(),
		Mode: uint32(st.Mode().Perm()), Permissions: st.Mode().String(), ModifiedTime: timestamppb.New(st.ModTime()),
	}
	if st.Mode()&fs.ModeSymlink == 0 {
		e.Type = typeOf(st)
		return e, nil
	}
	e.Type = filesystem.FileType_FILE_TYPE_SYMLINK
	target, err := filepath.EvalSymlinks(full)
	if err != nil {
		target, _ = os.Readlink(full)
	} else if t, err := os.Stat(target); err == nil {
		e.Type = typeOf(t)
	}
	target = strings.TrimPrefix(target, dir)
	e.SymlinkTarget = &target
	return e, nil
}

func typeOf(st fs.FileInfo) filesystem.FileType {
	switch {
	case st.IsDir():
		return filesystem.FileType_FILE_TYPE_DIRECTORY
	case st.Mode().IsRegular():
		return filesystem.FileType_FILE_TYPE_FILE
	}
	return filesystem.FileType_FILE_TYPE_UNSPECIFIED
}
