package agent

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/timestamppb"

	fspb "github.com/cubesandbox/cubelet/api/envd/filesystem"
)

// metadataPrefix begins the extended attributes that hold a file's metadata.
const metadataPrefix = "user.e2b."

// entry describes path. A symbolic link that leads somewhere has the type of its target;
// one that leads nowhere is of type symlink; one that leads in a circle is described
// and ELOOP.
func entry(path string, ids *accounts) (*fspb.EntryInfo, error) {
	st, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	e := &fspb.EntryInfo{
		Name:         filepath.Base(path),
		Type:         fileType(st.Mode()),
		Path:         path,
		Size:         st.Size(),
		Mode:         uint32(st.Mode().Perm()),
		Permissions:  st.Mode().String(),
		ModifiedTime: timestamppb.New(st.ModTime()),
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		e.Owner, e.Group = ids.nameOf(passwdPath, sys.Uid), ids.nameOf(groupPath, sys.Gid)
	}
	if st.Mode()&fs.ModeSymlink != 0 {
		return e, resolveLink(e, path)
	}
	e.Metadata = readMetadata(path)
	return e, nil
}

func resolveLink(e *fspb.EntryInfo, path string) error {
	target, err := filepath.EvalSymlinks(path)
	if err != nil {
		if _, err := os.Stat(path); errors.Is(err, syscall.ELOOP) {
			return err
		}
		if target, err = os.Readlink(path); err != nil {
			return err
		}
		e.SymlinkTarget = &target
		return nil
	}
	e.SymlinkTarget = &target
	if st, err := os.Stat(target); err == nil {
		e.Type = fileType(st.Mode())
	}
	return nil
}

func fileType(m fs.FileMode) fspb.FileType {
	switch {
	case m.IsRegular():
		return fspb.FileType_FILE_TYPE_FILE
	case m.IsDir():
		return fspb.FileType_FILE_TYPE_DIRECTORY
	case m&fs.ModeSymlink != 0:
		return fspb.FileType_FILE_TYPE_SYMLINK
	}
	return fspb.FileType_FILE_TYPE_UNSPECIFIED
}

// readMetadata returns the metadata of an upload, nil when the file has none.
func readMetadata(path string) map[string]string {
	var meta map[string]string
	for _, name := range metadataNames(path) {
		buf := make([]byte, maxMetadata)
		n, err := unix.Lgetxattr(path, metadataPrefix+name, buf)
		if err != nil {
			continue
		}
		if meta == nil {
			meta = map[string]string{}
		}
		meta[name] = string(buf[:n])
	}
	return meta
}

func metadataNames(path string) []string {
	size, err := unix.Llistxattr(path, nil)
	if err != nil || size <= 0 {
		return nil
	}
	buf := make([]byte, size)
	if size, err = unix.Llistxattr(path, buf); err != nil {
		return nil
	}
	var names []string
	for attr := range strings.SplitSeq(string(buf[:size]), "\x00") {
		if name, ok := strings.CutPrefix(attr, metadataPrefix); ok {
			names = append(names, name)
		}
	}
	return names
}
