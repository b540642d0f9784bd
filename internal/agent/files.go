package agent

import (
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"mime"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"connectrpc.com/connect"
)

// files reads and writes files of any size without holding them in memory.
func (s *Server) files(w http.ResponseWriter, r *http.Request) {
	if !allow(w, r, http.MethodGet, http.MethodHead, http.MethodPost) {
		return
	}
	op := opRead
	if r.Method == http.MethodPost {
		op = opWrite
	}
	q := r.URL.Query()
	if err := s.identity().checkFileAccess(r, q, op); err != nil {
		writeError(w, http.StatusUnauthorized, err.Error())
		return
	}
	name := q.Get("username")
	if name == "" {
		name = requestUser(r.Header)
	}
	if op == opRead {
		s.download(w, r, q, name)
		return
	}
	s.upload(w, r, q, name)
}

// fileStatus is the HTTP status of an error of the file system or of resolve.
func fileStatus(err error) int {
	var ce *connect.Error
	switch {
	case errors.As(err, &ce) && ce.Code() == connect.CodeUnauthenticated:
		return http.StatusUnauthorized
	case errors.Is(err, fs.ErrNotExist):
		return http.StatusNotFound
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return http.StatusInsufficientStorage
	case errors.Is(err, syscall.EISDIR), errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.ELOOP),
		errors.Is(err, syscall.ENAMETOOLONG), errors.Is(err, syscall.EINVAL), errors.Is(err, errBadUpload):
		return http.StatusBadRequest
	}
	return http.StatusInternalServerError
}

func writeFileError(w http.ResponseWriter, err error) {
	message := err.Error()
	if ce := new(connect.Error); errors.As(err, &ce) {
		message = ce.Message()
	}
	writeError(w, fileStatus(err), message)
}

func (s *Server) download(w http.ResponseWriter, r *http.Request, q url.Values, userName string) {
	path, _, err := s.resolve(q.Get("path"), userName)
	if err != nil {
		writeFileError(w, err)
		return
	}
	// O_NONBLOCK: opening a FIFO must not wait for a writer.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		writeFileError(w, err)
		return
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		writeFileError(w, err)
		return
	}
	if !st.Mode().IsRegular() {
		writeError(w, http.StatusBadRequest, fmt.Sprintf("path '%s' is a %s, not a file", path, kind(st.Mode())))
		return
	}
	coding, ok := contentCoding(r.Header)
	if !ok {
		writeError(w, http.StatusNotAcceptable, "no acceptable encoding; identity and gzip are supported")
		return
	}
	h := w.Header()
	h.Set("Content-Disposition", mime.FormatMediaType("inline", map[string]string{"filename": filepath.Base(path)}))
	h.Set("Vary", "Accept-Encoding")
	h.Set("Cache-Control", "no-store")
	if coding == "gzip" && r.Method == http.MethodGet {
		sendGzip(w, f, path)
		return
	}
	if st.Size() == 0 && r.Method == http.MethodGet {
		sendUnsized(w, f)
		return
	}
	http.ServeContent(w, r, path, st.ModTime(), f)
}

func kind(m fs.FileMode) string {
	if m.IsDir() {
		return "directory"
	}
	return "special file"
}

// sendUnsized sends a file that says it is empty; those of /proc are not.
func sendUnsized(w http.ResponseWriter, f *os.File) {
	w.Header().Set("Content-Type", "application/octet-stream")
	if _, err := io.Copy(w, f); err != nil {
		panic(http.ErrAbortHandler)
	}
}

func sendGzip(w http.ResponseWriter, f *os.File, path string) {
	if ct := mime.TypeByExtension(filepath.Ext(path)); ct != "" {
		w.Header().Set("Content-Type", ct)
	} else {
		w.Header().Set("Content-Type", "application/octet-stream")
	}
	w.Header().Set("Content-Encoding", "gzip")
	z, err := gzip.NewWriterLevel(w, gzip.BestSpeed)
	if err == nil {
		_, err = io.Copy(z, f)
	}
	if err == nil {
		err = z.Close()
	}
	if err != nil {
		panic(http.ErrAbortHandler) // a cut connection tells the client that the file is not whole
	}
}

// contentCoding chooses identity or gzip from Accept-Encoding. A range or a condition
// means bytes of the file itself, so identity.
func contentCoding(h http.Header) (coding string, ok bool) {
	identity, gz, star := 1.0, -1.0, -1.0
	explicit := false
	for part := range strings.SplitSeq(strings.Join(h.Values("Accept-Encoding"), ","), ",") {
		name, params, _ := strings.Cut(part, ";")
		quality := 1.0
		if v, found := strings.CutPrefix(strings.TrimSpace(params), "q="); found {
			if f, err := strconv.ParseFloat(v, 64); err == nil {
				quality = f
			}
		}
		switch strings.ToLower(strings.TrimSpace(name)) {
		case "identity":
			identity, explicit = quality, true
		case "gzip", "x-gzip":
			gz = quality
		case "*":
			star = quality
		}
	}
	if gz < 0 {
		gz = star
	}
	if star == 0 && !explicit {
		identity = 0
	}
	for _, k := range [...]string{"Range", "If-Range", "If-Match", "If-None-Match", "If-Modified-Since", "If-Unmodified-Since"} {
		if h.Get(k) != "" {
			return "identity", true
		}
	}
	switch {
	case gz > 0 && (gz >= identity || !explicit):
		return "gzip", true
	case identity > 0:
		return "identity", true
	}
	return "", false
}
