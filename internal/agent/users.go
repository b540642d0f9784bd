package agent

import (
	"bufio"
	"fmt"
	"os"
	"strconv"
	"strings"

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

// lookupUser resolves user[:group], names or numbers, in the files of the image as they
// are now. A number needs no entry, and root exists in an image without any.
func lookupUser(spec string) (*user, error) {
	name, group, hasGroup := strings.Cut(spec, ":")
	u, err := userByName(name)
	if err != nil {
		return nil, err
	}
	if u == nil {
		return nil, errUser(spec)
	}
	if !hasGroup {
		u.groups = supplementary(u.name, u.gid)
		return u, nil
	}
	gid, ok := groupByName(group)
	if !ok {
		return nil, errUser(spec)
	}
	u.gid, u.groups = gid, []uint32{gid}
	return u, nil
}

func userByName(name string) (*user, error) {
	if name == "" {
		return nil, nil
	}
	num, numErr := strconv.ParseUint(name, 10, 32)
	var found, byNumber *user
	err := eachEntry(passwdPath, 7, func(f []string) bool {
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

func groupByName(name string) (uint32, bool) {
	var gid uint64
	found := false
	err := eachEntry(groupPath, 3, func(f []string) bool {
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
func supplementary(name string, gid uint32) []uint32 {
	groups := []uint32{gid}
	_ = eachEntry(groupPath, 4, func(f []string) bool {
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
func nameOf(path string, id uint32) string {
	want := strconv.FormatUint(uint64(id), 10)
	name := want
	_ = eachEntry(path, 3, func(f []string) bool {
		if f[2] == want {
			name = f[0]
		}
		return f[2] != want
	})
	return name
}

// eachEntry calls f with the fields of each line of a colon-separated file that has at
// least n of them, until it returns false. A missing file has no entries.
func eachEntry(path string, n int, f func([]string) bool) error {
	file, err := os.Open(path)
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		fields := strings.Split(lines.Text(), ":")
		if len(fields) < n || strings.HasPrefix(fields[0], "#") {
			continue
		}
		if !f(fields) {
			break
		}
	}
	return nil
}
