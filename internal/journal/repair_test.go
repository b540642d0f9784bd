package journal

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	bolt "go.etcd.io/bbolt"

	cube "github.com/cubesandbox/cubelet"
)

// filled returns the path of a closed journal with n records "k<i>" in the table "a".
func filled(t *testing.T, n int) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "j")
	j := openTest(t, path)
	table := NewTable[record](j, "a")
	ops := make([]Op, 0, n)
	for i := range n {
		ops = append(ops, table.PutOp(fmt.Sprintf("k%04d", i), record{strings.Repeat("n", 100), i}))
	}
	if err := j.Commit(t.Context(), ops...); err != nil {
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

func putRaw(t *testing.T, j *Journal, key string, raw []byte) {
	t.Helper()
	err := j.update(t.Context(), func(tx *bolt.Tx) error {
		return applyOps(tx, []Op{{bucket: "a", key: key, value: raw}})
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestCorruptRecordIsQuarantinedAndTheRestWorks(t *testing.T) {
	for _, tc := range []struct {
		name string
		raw  []byte
	}{
		{"empty", []byte{}},
		{"short", []byte{1, 2}},
		{"wrong checksum", append(seal("a", "bad", []byte(`{}`)), ' ')},
		{"of another key", seal("a", "k0001", []byte(`{}`))},
		{"of a later format", append([]byte{2}, seal("a", "bad", []byte(`{}`))[1:]...)},
		{"not the type", seal("a", "bad", []byte(`{"count":"text"}`))},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := filled(t, 3)
			j := openTest(t, path)
			putRaw(t, j, "bad", tc.raw)
			if err := j.Close(); err != nil {
				t.Fatal(err)
			}
			j = openTest(t, path)
			table := NewTable[record](j, "a")
			all, err := table.All()
			if err != nil || len(all) != 3 {
				t.Errorf("All = %d records, %v; want the 3 good ones", len(all), err)
			}
			q := j.Quarantined()
			if len(q) != 1 || q[0].Bucket != "a" || q[0].Key != "bad" || !bytes.Equal(q[0].Data, tc.raw) || q[0].Reason == "" {
				t.Errorf("quarantine: %+v", q)
			}
			if _, ok, err := table.Get("bad"); ok || err != nil {
				t.Errorf("Get after quarantine: %v, %v", ok, err)
			}
			if err := j.Commit(t.Context(), table.InsertOp("bad", record{"good", 1})); err != nil {
				t.Errorf("insert under the freed key: %v", err)
			}
		})
	}
}

func TestGetReportsACorruptRecordOnce(t *testing.T) {
	j := openTest(t, filled(t, 1))
	putRaw(t, j, "bad", []byte("junk"))
	table := NewTable[record](j, "a")
	if _, ok, err := table.Get("bad"); ok || cube.CodeOf(err) != cube.CodeInternal || err == nil {
		t.Errorf("first Get: %v, %v; want Internal", ok, err)
	}
	if _, ok, err := table.Get("bad"); ok || err != nil {
		t.Errorf("second Get: %v, %v; want nothing", ok, err)
	}
	if q := j.Quarantined(); len(q) != 1 {
		t.Errorf("quarantine: %v", q)
	}
}

// TestDamagedFileIsSetAsideAndReported breaks the file in many ways: the journal opens,
// reports the file, and holds only records that were written.
func TestDamagedFileIsSetAsideAndReported(t *testing.T) {
	const n = 300
	page := os.Getpagesize()
	for _, tc := range []struct {
		name    string
		breakIt func(b []byte) []byte
		some    bool // some records can be carried over
	}{
		{"no database at all", func([]byte) []byte { return bytes.Repeat([]byte("text "), 9000) }, false},
		{"both meta pages zero", func(b []byte) []byte { clear(b[:2*page]); return b }, false},
		{"truncated to the meta pages", func(b []byte) []byte { return b[:2*page] }, false},
		{"truncated by half", func(b []byte) []byte { return b[:len(b)/2/page*page] }, false},
		{"one byte", func([]byte) []byte { return []byte{0} }, false},
		{"every data page overwritten", func(b []byte) []byte {
			copy(b[2*page:], bytes.Repeat([]byte{0xff}, len(b)))
			return b
		}, false},
		{"free list overwritten", func(b []byte) []byte { return overwritePage(b, page, 0x10) }, true},
		{"leaf pages overwritten", func(b []byte) []byte { return overwritePage(b, page, 0x02) }, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := filled(t, n)
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			broken := tc.breakIt(b)
			if err := os.WriteFile(path, broken, 0o600); err != nil {
				t.Fatal(err)
			}
			j := openTest(t, path)
			all, err := NewTable[record](j, "a").All()
			if err != nil {
				t.Fatal(err)
			}
			if tc.some != (len(all) == n) && tc.some {
				t.Errorf("%d records were carried over, want %d", len(all), n)
			}
			for k, v := range all {
				if k != fmt.Sprintf("k%04d", v.Count) {
					t.Errorf("record %s is %v", k, v)
				}
			}
			q := j.Quarantined()
			if len(q) != 1 || q[0].Path == "" {
				t.Fatalf("quarantine: %+v, want the file", q)
			}
			aside, err := os.ReadFile(q[0].Path)
			if err != nil || !bytes.Equal(aside, broken) {
				t.Errorf("the file set aside is not the broken one: %v", err)
			}
			if err := NewTable[record](j, "a").Put("new", record{}); err != nil {
				t.Errorf("put after the repair: %v", err)
			}
			if err := j.Close(); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(q, openTest(t, path).Quarantined()); diff != "" {
				t.Errorf("quarantine of the next daemon (-before +after):\n%s", diff)
			}
		})
	}
}

// overwritePage fills every page with that flag, except its header, with a pattern.
func overwritePage(b []byte, page int, flag byte) []byte {
	for at := 2 * page; at < len(b); at += page {
		if b[at+8] == flag {
			copy(b[at+16:at+page], bytes.Repeat([]byte{0xa5}, page))
		}
	}
	return b
}

// TestAnyFlippedByteNeverStopsTheDaemon flips bytes all over the file, one at a time.
func TestAnyFlippedByteNeverStopsTheDaemon(t *testing.T) {
	source := filled(t, 40)
	good, err := os.ReadFile(source)
	if err != nil {
		t.Fatal(err)
	}
	used := 8 * os.Getpagesize() // the rest of the file was never written
	for at := 0; at < min(used, len(good)); at += 61 {
		path := filepath.Join(t.TempDir(), "j")
		b := bytes.Clone(good)
		b[at] ^= 0x5a
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		j, err := Open(path, Config{})
		if err != nil {
			t.Fatalf("byte %d: %v", at, err)
		}
		table := NewTable[record](j, "a")
		all, err := table.All()
		if err != nil {
			t.Errorf("byte %d: %v", at, err)
		}
		if len(all) < 40 && len(j.Quarantined()) == 0 {
			t.Errorf("byte %d: %d records and nothing in quarantine", at, len(all))
		}
		if err := j.Commit(context.Background(), table.PutOp("new", record{})); err != nil {
			t.Errorf("byte %d: %v", at, err)
		}
		if err := j.Close(); err != nil {
			t.Errorf("byte %d: %v", at, err)
		}
	}
}

func FuzzUnseal(f *testing.F) {
	f.Add("a", "k", []byte(nil))
	f.Add("a", "k", seal("a", "k", []byte(`{"name":"x"}`)))
	f.Add("a", "k", seal("b", "k", []byte(`{}`)))
	f.Add("a", "\x00k", seal("a\x00", "k", nil))
	f.Fuzz(func(t *testing.T, bucket, key string, b []byte) {
		if payload, err := unseal(bucket, key, b); err == nil && !bytes.Equal(seal(bucket, key, payload), b) {
			t.Errorf("unseal accepted %q, which seal does not write", b)
		}
		sealed := seal(bucket, key, b)
		payload, err := unseal(bucket, key, sealed)
		if err != nil || !bytes.Equal(payload, b) {
			t.Errorf("round trip of %q: %q, %v", b, payload, err)
		}
		for i := range sealed {
			sealed[i] ^= 1
			if _, err := unseal(bucket, key, sealed); err == nil {
				t.Errorf("flipped bit in byte %d is not noticed", i)
			}
			sealed[i] ^= 1
		}
	})
}

// FuzzScan feeds broken database files to the structure check: it must end, and what it
// accepts bbolt must be able to read.
func FuzzScan(f *testing.F) {
	path := filepath.Join(f.TempDir(), "j")
	j, err := Open(path, Config{})
	if err != nil {
		f.Fatal(err)
	}
	table := NewTable[record](j, "a")
	for i := range 60 {
		if err := table.Put(fmt.Sprintf("k%02d", i), record{strings.Repeat("n", 100), i}); err != nil {
			f.Fatal(err)
		}
	}
	if err := j.Close(); err != nil {
		f.Fatal(err)
	}
	good, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(uint32(0), []byte(nil))
	f.Add(uint32(24), []byte{0xff, 0xff})
	f.Add(uint32(2*os.Getpagesize()+8), []byte{0x02})
	f.Fuzz(func(t *testing.T, at uint32, patch []byte) {
		b := bytes.Clone(good)
		copy(b[int(at)%len(b):], patch)
		path := filepath.Join(t.TempDir(), "j")
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		j, err := Open(path, Config{})
		if err != nil {
			t.Fatal(err)
		}
		if err := NewTable[record](j, "a").Put("new", record{}); err != nil {
			t.Error(err)
		}
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
}
