package agent

import (
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Limits of a file's metadata, in bytes.
const (
	maxMetadataKey = 246
	maxMetadata    = 4096
	metadataHeader = "X-Metadata-"
)

var errBadUpload = errors.New("bad upload")

func badUpload(format string, args ...any) error {
	return &uploadError{fmt.Sprintf(format, args...)}
}

// uploadError is a mistake of the client.
type uploadError struct{ text string }

func (e *uploadError) Error() string        { return e.text }
func (e *uploadError) Is(target error) bool { return target == errBadUpload }

// uploaded is the answer for one file.
type uploaded struct {
	Path     string            `json:"path"`
	Name     string            `json:"name"`
	Type     string            `json:"type"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

func (s *Server) upload(w http.ResponseWriter, r *http.Request, q url.Values, userName string) {
	_, who, err := s.resolve("", userName)
	if err != nil {
		writeFileError(w, err)
		return
	}
	meta, err := requestMetadata(r.Header)
	if err != nil {
		writeFileError(w, err)
		return
	}
	u := &uploader{server: s, who: who, path: q.Get("path"), meta: meta, done: []uploaded{}}
	if err := u.receive(r); err != nil {
		writeFileError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, u.done)
}

type uploader struct {
	server *Server
	who    *user
	path   string // of the query
	meta   map[string]string
	done   []uploaded
}

func (u *uploader) receive(r *http.Request) error {
	body := io.Reader(r.Body)
	switch enc := strings.ToLower(r.Header.Get("Content-Encoding")); enc {
	case "", "identity":
	case "gzip":
		z, err := gzip.NewReader(body)
		if err != nil {
			return badUpload("gzip: %v", err)
		}
		body = z
	default:
		return badUpload("unsupported content encoding %q", enc)
	}
	media, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil {
		return badUpload("content type: %v", err)
	}
	switch media {
	case "application/octet-stream":
		if u.path == "" {
			return badUpload("the query parameter path is required")
		}
		return u.store(u.path, body)
	case "multipart/form-data":
		return u.parts(multipart.NewReader(body, params["boundary"]))
	}
	return badUpload("unsupported content type %q", media)
}

// parts stores every part with the name "file".
func (u *uploader) parts(m *multipart.Reader) error {
	for {
		part, err := m.NextRawPart()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return badUpload("multipart: %v", err)
		}
		// part.FileName would drop the directories.
		_, params, _ := mime.ParseMediaType(part.Header.Get("Content-Disposition"))
		if params["name"] != "file" {
			continue
		}
		path := u.path
		if path == "" {
			path = params["filename"]
		}
		if path == "" {
			return badUpload("a part has no filename, and the query no path")
		}
		if err := u.store(path, part); err != nil {
			return err
		}
	}
}

// store writes one file. It appears under its name when it is whole, never before.
func (u *uploader) store(path string, body io.Reader) error {
	full := expand(path, u.base(), u.who)
	if err := makeDirs(filepath.Dir(full), u.who); err != nil {
		return err
	}
	target, err := writeTarget(full)
	if err != nil {
		return err
	}
	if target.special {
		err = writeInPlace(target.path, body)
	} else {
		err = u.replace(target, body)
	}
	if err != nil {
		return err
	}
	u.done = append(u.done, uploaded{Path: full, Name: filepath.Base(full), Type: "file", Metadata: u.meta})
	return nil
}

func (u *uploader) base() string {
	if dir := u.server.identity().workdir; dir != "" {
		return dir
	}
	return u.who.home
}

// target is where the bytes go: path with its last link followed.
type target struct {
	path    string
	mode    fs.FileMode // of the file that is there, 0644 when there is none
	special bool        // a device, FIFO or the like, which cannot be replaced
}

func writeTarget(path string) (target, error) {
	const maxLinks = 40
	for range maxLinks {
		st, err := os.Lstat(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return target{path: path, mode: 0o644}, nil
		case err != nil:
			return target{}, err
		case st.IsDir():
			return target{}, badUpload("path is a directory: %s", path)
		case st.Mode()&fs.ModeSymlink == 0:
			return target{path: path, mode: st.Mode(), special: !st.Mode().IsRegular()}, nil
		}
		next, err := os.Readlink(path)
		if err != nil {
			return target{}, err
		}
		if !filepath.IsAbs(next) {
			next = filepath.Join(filepath.Dir(path), next)
		}
		path = next
	}
	return target{}, &fs.PathError{Op: "open", Path: path, Err: syscall.ELOOP}
}

func writeInPlace(path string, body io.Reader) error {
	f, err := os.OpenFile(path, os.O_WRONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	return copyBody(f, body)
}

// replace writes a new file beside the target and renames it.
func (u *uploader) replace(t target, body io.Reader) (err error) {
	f, err := os.CreateTemp(filepath.Dir(t.path), ".cube-upload-*")
	if err != nil {
		return err
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	if err := copyBody(f, body); err != nil {
		return err
	}
	if err := f.Chown(int(u.who.uid), int(u.who.gid)); err != nil {
		return err
	}
	if err := f.Chmod(t.mode.Perm()); err != nil {
		return err
	}
	for k, v := range u.meta {
		if err := unix.Fsetxattr(int(f.Fd()), metadataPrefix+k, []byte(v), 0); err != nil {
			return fmt.Errorf("set metadata %s: %w", k, err)
		}
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), t.path)
}

// copyBody copies the whole body. What is wrong with the body, for example a client that
// went away, is the client's mistake; what is wrong with the file is not.
func copyBody(f *os.File, body io.Reader) error {
	buf := make([]byte, 64<<10)
	for {
		n, err := body.Read(buf)
		if _, werr := f.Write(buf[:n]); werr != nil {
			return werr
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return badUpload("the upload is not whole: %v", err)
		}
	}
}

// requestMetadata returns the metadata of an upload from its headers.
func requestMetadata(h http.Header) (map[string]string, error) {
	var meta map[string]string
	total := 0
	for name, values := range h {
		if len(name) <= len(metadataHeader) || !strings.EqualFold(name[:len(metadataHeader)], metadataHeader) {
			continue
		}
		key, value := strings.ToLower(name[len(metadataHeader):]), values[0]
		total += len(key) + len(value)
		switch {
		case len(key) > maxMetadataKey:
			return nil, badUpload("metadata key %.20s… is longer than %d bytes", key, maxMetadataKey)
		case total > maxMetadata:
			return nil, badUpload("metadata is larger than %d bytes", maxMetadata)
		case !printable(key), !printable(value):
			return nil, badUpload("metadata %s is not printable ASCII", key)
		}
		if meta == nil {
			meta = map[string]string{}
		}
		meta[key] = value
	}
	return meta, nil
}

func printable(s string) bool {
	for i := range len(s) {
		if s[i] < 0x20 || s[i] > 0x7e {
			return false
		}
	}
	return true
}
