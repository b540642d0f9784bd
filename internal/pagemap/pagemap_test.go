package pagemap

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// private maps a file of n pages that are not zero, as a restored guest's memory is.
func private(t *testing.T, n int) ([]byte, Range) {
	t.Helper()
	page := os.Getpagesize()
	content := make([]byte, n*page)
	for i := range content {
		content[i] = 7
	}
	path := filepath.Join(t.TempDir(), "memory")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	m, err := unix.Mmap(int(f.Fd()), 0, len(content), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(m) })
	start := uint64(uintptr(unsafe.Pointer(&m[0])))
	return m, Range{start, start + uint64(len(m))}
}

func TestOnlyWrittenPagesAreDirty(t *testing.T) {
	const pages = 64
	page := os.Getpagesize()
	m, r := private(t, pages)
	sum := 0
	for p := range pages / 2 {
		sum += int(m[p*page]) // read pages are the file's
	}
	if sum == 0 {
		t.Fatal("the mapping is empty")
	}
	// A read page, two neighbours, one never read, and the last.
	for _, p := range []int{3, 10, 11, 40, pages - 1} {
		m[p*page+5]++
	}
	at := func(p int) uint64 { return r.Start + uint64(p*page) }
	want := []Range{{at(3), at(4)}, {at(10), at(12)}, {at(40), at(41)}, {at(pages - 1), at(pages)}}
	got, err := Dirty(os.Getpid(), r)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestAPartOfAMappingIsLookedAtAlone(t *testing.T) {
	page := os.Getpagesize()
	m, r := private(t, 16)
	for p := range 16 {
		m[p*page] = 1
	}
	part := Range{r.Start + 4*uint64(page), r.Start + 6*uint64(page)}
	got, err := Dirty(os.Getpid(), part)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]Range{part}, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// More ranges than one call of the kernel returns, and more entries than one read.
func TestBothWaysAgree(t *testing.T) {
	const pages = 20000
	page := os.Getpagesize()
	m, r := private(t, pages)
	random := rand.New(rand.NewPCG(1, 2))
	written := 0
	for p := range pages {
		if random.IntN(3) == 0 {
			m[p*page] = 1
			written++
		}
	}
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	slow, err := read(f, r)
	if err != nil {
		t.Fatal(err)
	}
	var total uint64
	for _, d := range slow {
		total += d.Len()
	}
	if total != uint64(written*page) {
		t.Errorf("%d bytes are dirty, %d were written", total, written*page)
	}
	fast, err := scan(f, r)
	if err != nil {
		t.Fatalf("this kernel has no PAGEMAP_SCAN, the test needs Linux 6.7: %v", err)
	}
	if len(fast) <= maxRegions {
		t.Fatalf("only %d ranges: one call returned them all", len(fast))
	}
	if d := cmp.Diff(slow, fast); d != "" {
		t.Errorf("(-read +scan):\n%s", d)
	}
}

func TestAProcessThatIsGoneIsAnError(t *testing.T) {
	if got, err := Dirty(1<<30, Range{4096, 8192}); err == nil {
		t.Errorf("got %v", got)
	}
}
