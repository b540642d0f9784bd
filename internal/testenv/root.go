package testenv

import (
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// TempRoot makes an empty directory with a path of at most 20 bytes (a unix socket
// below it must stay under 108) and removes it when the test ends. The test then fails
// when a mount or loop device is left below it (they are taken away, so that the next
// test starts clean), or a cgroup, link or nftables table that bears its base name or
// Tag. Directories of one test share a prefix by which Leaks knows what belongs to it.
func TempRoot(t testing.TB) string {
	t.Helper()
	dir := makeRoot(t)
	t.Cleanup(func() {
		if left := named(dir); len(left) > 0 {
			t.Errorf("left of %s:\n\t%s", dir, strings.Join(left, "\n\t"))
		}
		if left := looseEnds(dir); len(left) > 0 {
			t.Errorf("left below %s:\n\t%s", dir, strings.Join(left, "\n\t"))
			detach(t, dir)
		}
		if len(looseEnds(dir)) > 0 {
			return // never remove files through a mount of something else
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("remove the test's root: %v", err)
		}
	})
	return dir
}

func makeRoot(t testing.TB) string {
	t.Helper()
	prefix := rootPrefix(t)
	for range 100 {
		dir := prefix + base36(rand.Uint64(), 3)
		err := os.Mkdir(dir, 0o711)
		if os.IsExist(err) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		// Other users (each VMM has one of its own) may pass, whatever the umask.
		if err := os.Chmod(dir, 0o711); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	t.Fatalf("no free name below %s", prefix)
	return ""
}

// rootPrefix is what the paths of all roots of one test (its subtests included) in this
// process begin with, and no others.
func rootPrefix(t testing.TB) string {
	top, _, _ := strings.Cut(t.Name(), "/")
	h := fnv.New64a()
	_, _ = h.Write([]byte(top))
	return filepath.Join("/tmp", "cb-"+strconv.FormatInt(int64(os.Getpid()), 36)+base36(h.Sum64(), 3))
}

// base36 returns the last n digits of v in base 36.
func base36(v uint64, n int) string {
	s := fmt.Sprintf("%0*s", n, strconv.FormatUint(v, 36))
	return s[len(s)-n:]
}

// looseEnds lists the mounts and loop devices at or below paths that begin with prefix.
func looseEnds(prefix string) []string {
	var left []string
	for _, m := range mountsBelow(prefix) {
		left = append(left, "mount "+m)
	}
	for dev, file := range loopsBelow(prefix) {
		left = append(left, "loop device "+dev+" of "+file)
	}
	return left
}

func detach(t testing.TB, prefix string) {
	mounts := mountsBelow(prefix)
	for i := len(mounts) - 1; i >= 0; i-- {
		if err := syscall.Unmount(mounts[i], syscall.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", mounts[i], err)
		}
	}
	for dev := range loopsBelow(prefix) {
		clearLoop(t, dev)
	}
}

func clearLoop(t testing.TB, dev string) {
	const loopClrFD = 0x4c01 // LOOP_CLR_FD of <linux/loop.h>
	f, err := os.Open(dev)
	if err != nil {
		t.Error(err)
		return
	}
	defer f.Close()
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, f.Fd(), loopClrFD, 0)
	if errno != 0 && errno != syscall.ENXIO {
		t.Errorf("detach %s: %v", dev, errno)
	}
}
