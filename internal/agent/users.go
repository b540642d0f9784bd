package agent

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"connectrpc.com/connect"
)

// user is an identity that programs run as and files belong to.
type user struct {
	name     string
	uid, gid uint32
	groups   []uint32
	home     string
	shell    string
}

const (
	passwdPath = "/etc/passwd"
	groupPath  = "/etc/group"
)

// errUser is the error that E2B's clients expect for a user that does not exist.
func errUser(name string) error {
	return connect.NewError(connect.CodeUnauthenticated, fmt.Errorf("invalid username: '%s'", name))
}

// lookup resolves user[:group], names or numbers, in the files of the image as they
// are now. A number needs no entry, and root exists in an image without any.
func (a *accounts) lookup(spec string) (*user, error) {
	name, group, hasGroup := strings.Cut(spec, ":")
	u, err := a.userByName(name)
	if err != nil {
		return nil, err
	}
	if u == nil {
		return nil, errUser(spec)
	}
	if !hasGroup {
		u.groups = a.supplementary(u.name, u.gid)
		return u, nil
	}
	gid, ok := a.groupByName(group)
	if !ok {
		return nil, errUser(spec)
	}
	u.gid, u.groups = gid, []uint32{gid}
	return u, nil
}

func (a *accounts) userByName(name string) (*user, error) {
	if name == "" {
		return nil, nil
	}
	num, numErr := strconv.ParseUint(name, 10, 32)
	var found, byNumber *user
	err := a.each(passwdPath, 7, func(f []string) bool {
		switch {
		case f[0] == name:
			found = entryUser(f)
		case numErr == nil && byNumber == nil && f[2] == name:
			byNumber = entryUser(f)
		}
		return found == nil
	})
	switch {
	case err != nil:
		return nil, connect.NewError(connect.CodeInternal, err)
	case found != nil:
		return found, nil
	case byNumber != nil:
		return byNumber, nil
	case numErr == nil:
		return &user{name: name, uid: uint32(num), gid: 0, home: "/"}, nil
	case name == "root":
		return &user{name: name, home: "/root"}, nil
	}
	return nil, nil
}

func entryUser(f []string) *user {
	uid, err := strconv.ParseUint(f[2], 10, 32)
	if err != nil {
		return nil
	}
	gid, err := strconv.ParseUint(f[3], 10, 32)
	if err != nil {
		return nil
	}
	u := &user{name: f[0], uid: uint32(uid), gid: uint32(gid), home: f[5], shell: f[6]}
	if u.home == "" {
		u.home = "/"
	}
	return u
}

func (a *accounts) groupByName(name string) (uint32, bool) {
	var gid uint64
	found := false
	err := a.each(groupPath, 3, func(f []string) bool {
		if f[0] != name {
			return true
		}
		var err error
		gid, err = strconv.ParseUint(f[2], 10, 32)
		found = err == nil
		return !found
	})
	if err == nil && found {
		return uint32(gid), true
	}
	n, err := strconv.ParseUint(name, 10, 32)
	return uint32(n), err == nil
}

// supplementary returns the groups that the user is a member of, gid first.
func (a *accounts) supplementary(name string, gid uint32) []uint32 {
	groups := []uint32{gid}
	_ = a.each(groupPath, 4, func(f []string) bool {
		for member := range strings.SplitSeq(f[3], ",") {
			if member != name {
				continue
			}
			if n, err := strconv.ParseUint(f[2], 10, 32); err == nil && uint32(n) != gid {
				groups = append(groups, uint32(n))
			}
			break
		}
		return true
	})
	return groups
}

// nameOf returns the name that the file gives to a number, or the number as text.
func (a *accounts) nameOf(path string, id uint32) string {
	want := strconv.FormatUint(uint64(id), 10)
	name := want
	_ = a.each(path, 3, func(f []string) bool {
		if f[2] == want {
			name = f[0]
		}
		return f[2] != want
	})
	return name
}

// accounts reads the files of the image that name users and groups, as they are now. What
// it has read it keeps as long as the file does not change, since opening a file of a
// restored guest costs far more than looking at its state.
type accounts struct {
	mu    sync.Mutex
	files map[string]*accountFile
}

// accountFile is the content of a file and the state that it was read in.
type accountFile struct {
	state   fileState
	entries [][]string
}

type fileState struct {
	dev, ino, size uint64
	mtime, ctime   syscall.Timespec
}

func stateOf(path string) (fileState, error) {
	var st syscall.Stat_t
	if err := syscall.Stat(path, &st); err != nil {
		return fileState{}, err
	}
	return fileState{st.Dev, st.Ino, uint64(st.Size), st.Mtim, st.Ctim}, nil
}

// maxAccounts bounds what is read of one file, in bytes.
const maxAccounts = 8 << 20

// entries returns the fields of each line. A missing file has none.
func (a *accounts) entries(path string) ([][]string, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	state, err := stateOf(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if f := a.files[path]; f != nil && f.state == state {
		return f.entries, nil
	}
	b, err := readLimited(path, maxAccounts)
	if err != nil {
		return nil, err
	}
	f := &accountFile{state: state}
	for line := range strings.Lines(string(b)) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			f.entries = append(f.entries, strings.Split(line, ":"))
		}
	}
	if a.files == nil {
		a.files = map[string]*accountFile{}
	}
	a.files[path] = f
	return f.entries, nil
}

func readLimited(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, limit))
}

// each calls f with every entry that has at least n fields until it returns false.
func (a *accounts) each(path string, n int, f func([]string) bool) error {
	entries, err := a.entries(path)
	for _, fields := range entries {
		if len(fields) >= n && !f(fields) {
			break
		}
	}
	return err
}
