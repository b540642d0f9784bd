package testenv

import (
	"crypto/sha256"
	"encoding/hex"
	"io/fs"
	"net"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Tag returns the four hexadecimal digits by which a node on the root is known in the
// names of its cgroups, links and nftables tables: the same that internal/daemon derives.
func Tag(root string) string {
	sum := sha256.Sum256([]byte(root))
	return hex.EncodeToString(sum[:2])
}

// named lists the host objects that bear the name, or the tag, of the root: the cgroup
// cubelet-TAG or one called after the root, links clTAG-N, tables cubelet-TAG.
func named(root string) []string {
	own := []string{filepath.Base(root), "cubelet-" + Tag(root), "cl" + Tag(root) + "-"}
	is := func(name string) bool {
		return slices.ContainsFunc(own, func(o string) bool { return strings.Contains(name, o) })
	}
	var found []string
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil // cgroups go away during the walk
		}
		if d.IsDir() && is(d.Name()) {
			found = append(found, "cgroup "+path)
			return fs.SkipDir
		}
		return nil
	})
	links, err := net.Interfaces()
	if err == nil {
		for _, l := range links {
			if is(l.Name) {
				found = append(found, "link "+l.Name)
			}
		}
	}
	return append(found, tables(is)...)
}

// tables lists the nftables tables whose name is in use by the root; none where nft is
// not installed, since nothing can have made one by name then.
func tables(is func(name string) bool) []string {
	out, err := exec.Command("nft", "list", "tables").Output()
	if err != nil {
		return nil
	}
	var found []string
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); len(f) == 3 && is(f[2]) {
			found = append(found, "nftables table "+f[1]+" "+f[2])
		}
	}
	return found
}
