package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"syscall"

	"connectrpc.com/connect"

	fspb "github.com/cubesandbox/cubelet/api/envd/filesystem"
	"github.com/cubesandbox/cubelet/api/envd/filesystem/filesystemconnect"
)

// filesystemService implements filesystem.Filesystem; what it does not have, watching, is
// answered by the embedded handler with Unimplemented.
type filesystemService struct {
	filesystemconnect.UnimplementedFilesystemHandler
	s *Server
}

// resolve returns the user of a request and the absolute form of path: ~ is the user's
// home, and a relative path starts at the sandbox's working directory, else at home.
func (s *Server) resolve(path, userName string) (string, *user, error) {
	who, err := s.user(userName)
	if err != nil {
		return "", nil, err
	}
	base := s.identity().workdir
	if base == "" {
		base = who.home
	}
	if path == "" {
		return base, who, nil
	}
	return expand(path, base, who), who, nil
}

func (fsv *filesystemService) resolve(path string, h http.Header) (string, *user, error) {
	return fsv.s.resolve(path, requestUser(h))
}

// fsError gives an error of the file system its connect code.
func fsError(err error) error {
	code := connect.CodeInternal
	switch {
	case errors.Is(err, fs.ErrNotExist):
		code = connect.CodeNotFound
	case errors.Is(err, syscall.ELOOP):
		code = connect.CodeFailedPrecondition
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.ENAMETOOLONG), errors.Is(err, syscall.EINVAL):
		code = connect.CodeInvalidArgument
	}
	return connect.NewError(code, err)
}

// Stat implements filesystem.Filesystem.
func (fsv *filesystemService) Stat(_ context.Context, req *connect.Request[fspb.StatRequest]) (*connect.Response[fspb.StatResponse], error) {
	path, _, err := fsv.resolve(req.Msg.GetPath(), req.Header())
	if err != nil {
		return nil, err
	}
	e, err := entry(path, &fsv.s.accounts)
	if err != nil {
		return nil, fsError(err)
	}
	return connect.NewResponse(&fspb.StatResponse{Entry: e}), nil
}

// MakeDir implements filesystem.Filesystem.
func (fsv *filesystemService) MakeDir(_ context.Context, req *connect.Request[fspb.MakeDirRequest]) (*connect.Response[fspb.MakeDirResponse], error) {
	path, who, err := fsv.resolve(req.Msg.GetPath(), req.Header())
	if err != nil {
		return nil, err
	}
	switch st, err := os.Stat(path); {
	case err == nil && st.IsDir():
		return nil, connect.NewError(connect.CodeAlreadyExists, fmt.Errorf("directory already exists: %s", path))
	case err == nil:
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("path already exists but it is not a directory: %s", path))
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fsError(err)
	}
	if err := makeDirs(path, who); err != nil {
		return nil, fsError(err)
	}
	e, err := entry(path, &fsv.s.accounts)
	if err != nil {
		return nil, fsError(err)
	}
	return connect.NewResponse(&fspb.MakeDirResponse{Entry: e}), nil
}

// makeDirs makes path and its missing parents, which belong to the user.
func makeDirs(path string, who *user) error {
	st, err := os.Stat(path)
	switch {
	case err == nil && st.IsDir():
		return nil
	case err == nil:
		return &fs.PathError{Op: "mkdir", Path: path, Err: syscall.ENOTDIR}
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	if err := makeDirs(filepath.Dir(path), who); err != nil {
		return err
	}
	if err := os.Mkdir(path, 0o755); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return makeDirs(path, who)
		}
		return err
	}
	return os.Lchown(path, int(who.uid), int(who.gid))
}

// Move implements filesystem.Filesystem.
func (fsv *filesystemService) Move(_ context.Context, req *connect.Request[fspb.MoveRequest]) (*connect.Response[fspb.MoveResponse], error) {
	src, who, err := fsv.resolve(req.Msg.GetSource(), req.Header())
	if err != nil {
		return nil, err
	}
	dst, _, err := fsv.resolve(req.Msg.GetDestination(), req.Header())
	if err != nil {
		return nil, err
	}
	if _, err := os.Lstat(src); err != nil {
		return nil, fsError(err)
	}
	if err := makeDirs(filepath.Dir(dst), who); err != nil {
		return nil, fsError(err)
	}
	if err := os.Rename(src, dst); err != nil {
		return nil, fsError(err)
	}
	e, err := entry(dst, &fsv.s.accounts)
	if err != nil {
		return nil, fsError(err)
	}
	return connect.NewResponse(&fspb.MoveResponse{Entry: e}), nil
}

// Remove implements filesystem.Filesystem. What does not exist is removed.
func (fsv *filesystemService) Remove(_ context.Context, req *connect.Request[fspb.RemoveRequest]) (*connect.Response[fspb.RemoveResponse], error) {
	path, _, err := fsv.resolve(req.Msg.GetPath(), req.Header())
	if err != nil {
		return nil, err
	}
	if err := os.RemoveAll(path); err != nil {
		return nil, fsError(err)
	}
	return connect.NewResponse(&fspb.RemoveResponse{}), nil
}

// ListDir implements filesystem.Filesystem.
func (fsv *filesystemService) ListDir(ctx context.Context, req *connect.Request[fspb.ListDirRequest]) (*connect.Response[fspb.ListDirResponse], error) {
	root, _, err := fsv.resolve(req.Msg.GetPath(), req.Header())
	if err != nil {
		return nil, err
	}
	st, err := os.Stat(root)
	if err != nil {
		return nil, fsError(err)
	}
	if !st.IsDir() {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("path is not a directory: %s", root))
	}
	l := &lister{ctx: ctx, ids: &fsv.s.accounts, res: &fspb.ListDirResponse{}}
	if err := l.list(root, max(int(req.Msg.GetDepth()), 1)); err != nil {
		return nil, fsError(err)
	}
	return connect.NewResponse(l.res), nil
}

type lister struct {
	ctx context.Context
	ids *accounts
	res *fspb.ListDirResponse
}

// list appends the entries of dir in sorted order, each directory followed by its own. It
// follows no links. Entries that vanish meanwhile are left out.
func (l *lister) list(dir string, depth int) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, d := range entries {
		if err := l.ctx.Err(); err != nil {
			return err
		}
		path := filepath.Join(dir, d.Name())
		e, _ := entry(path, l.ids)
		if e == nil {
			continue
		}
		l.res.Entries = append(l.res.Entries, e)
		if depth < 2 || !d.IsDir() {
			continue
		}
		if err := l.list(path, depth-1); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}
