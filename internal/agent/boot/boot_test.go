package boot

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cubesandbox/cubelet/internal/testenv"
)

func TestParseCmdlineTakesOurKeysOnly(t *testing.T) {
	got := ParseCmdline("console=ttyS0 quiet cube.root=/dev/vda cube.layer=/dev/vdb cube.address=1.2.3.4/30 cube.address=169.254.0.22/30 cube.gateway=169.254.0.21 cube.x root=/dev/sda\n")
	want := Options{Root: "/dev/vda", Layer: "/dev/vdb", Address: "169.254.0.22/30", Gateway: "169.254.0.21"}
	if got != want {
		t.Errorf("got %+v", got)
	}
}

func TestHostsNamesTheMachineOnce(t *testing.T) {
	hosts := "127.0.0.1\tlocalhost\n10.0.0.9 db"
	for _, name := range []string{"one", "two"} {
		hosts = hostsWith(hosts, name)
	}
	if want := "127.0.0.1\tlocalhost\n10.0.0.9 db\n127.0.1.1\ttwo # cube\n"; hosts != want {
		t.Errorf("got %q", hosts)
	}
}

func TestHostnamesThatWouldBreakFilesAreRefused(t *testing.T) {
	for _, name := range []string{"", "a b", "a\nb", "#", string(make([]byte, 65)), "a\x00"} {
		if checkHostname(name) == nil {
			t.Errorf("%q is accepted", name)
		}
	}
	if err := checkHostname("sb-1"); err != nil {
		t.Error(err)
	}
}

func TestReserveLeavesMostOfTheMemory(t *testing.T) {
	for total, want := range map[uint64]uint64{64 << 20: 16 << 20, 512 << 20: 32 << 20, 64 << 30: 64 << 20} {
		if got := reserve(total); got != want {
			t.Errorf("reserve(%d) = %d, want %d", total, got, want)
		}
	}
}

func TestEnsureDirReplacesWhatIsInTheWay(t *testing.T) {
	dir := t.TempDir()
	victim := filepath.Join(dir, "victim")
	if err := os.Mkdir(victim, 0o755); err != nil {
		t.Fatal(err)
	}
	link, file := filepath.Join(dir, "link"), filepath.Join(dir, "file")
	if err := os.Symlink(victim, link); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{link, file, filepath.Join(dir, "none"), victim} {
		if err := ensureDir(path); err != nil {
			t.Error(err)
		}
		if st, err := os.Lstat(path); err != nil || !st.IsDir() {
			t.Errorf("%s: %v, %v", path, st, err)
		}
	}
}

func TestEmptyingTheInitramfsStaysOnIt(t *testing.T) {
	testenv.RequireRoot(t)
	root := t.TempDir()
	other := filepath.Join(root, "newroot")
	if err := os.MkdirAll(filepath.Join(root, "modules", "deep"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(other, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", other, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(other, 0)
	kept := filepath.Join(other, "kept")
	for _, path := range []string{kept, filepath.Join(root, "init"), filepath.Join(root, "modules", "deep", "x.ko")} {
		if err := os.WriteFile(path, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	dir, err := os.Open(root)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := emptyRoot(dir); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(root)
	if err != nil || len(entries) != 1 || entries[0].Name() != "newroot" {
		t.Errorf("left: %v, %v", entries, err)
	}
	if _, err := os.Stat(kept); err != nil {
		t.Error(err)
	}
}

func TestMachineIDsHaveOneForm(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "id"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	files := &identityFiles{machineID: f}
	for _, id := range []string{"", "xyz", "0123456789ABCDEF0123456789ABCDEF", "0123456789abcdef0123456789abcdef0"} {
		if files.setMachineID(id) == nil {
			t.Errorf("%q is accepted", id)
		}
	}
	if err := files.setMachineID("0123456789abcdef0123456789abcdef"); err != nil {
		t.Error(err)
	}
	if got, err := content(f); err != nil || got != "0123456789abcdef0123456789abcdef\n" {
		t.Errorf("%q %v", got, err)
	}
}
