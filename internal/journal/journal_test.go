package journal

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

func TestRecordsSurviveReopening(t *testing.T) {
	path := filepath.Join(t.TempDir(), "dir", "journal.db")
	j := openTest(t, path)
	table := NewTable[record](j, "sandboxes")
	want := record{"a", 7}
	if err := table.Put("sb-1", want); err != nil {
		t.Fatal(err)
	}
	if err := table.Put("sb-2", record{"b", 8}); err != nil {
		t.Fatal(err)
	}
	if err := table.Delete("sb-2"); err != nil {
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	table = NewTable[record](openTest(t, path), "sandboxes")
	got, ok, err := table.Get("sb-1")
	if err != nil || !ok || got != want {
		t.Errorf("Get = %v, %v, %v; want %v", got, ok, err, want)
	}
	if _, ok, err := table.Get("sb-2"); ok || err != nil {
		t.Errorf("deleted record: %v, %v", ok, err)
	}
}

func TestCommitIsAllOrNothing(t *testing.T) {
	j := openTest(t, filepath.Join(t.TempDir(), "j"))
	a, b := NewTable[record](j, "a"), NewTable[record](j, "b")
	if err := a.Put("taken", record{"old", 1}); err != nil {
		t.Fatal(err)
	}
	err := j.Commit(t.Context(), b.PutOp("x", record{}), a.InsertOp("taken", record{"new", 2}))
	if cube.CodeOf(err) != cube.CodeAlreadyExists {
		t.Fatalf("insert over a record: %v, want AlreadyExists", err)
	}
	if _, ok, _ := b.Get("x"); ok {
		t.Error("the other change of a refused commit was kept")
	}
	if got, _, _ := a.Get("taken"); got.Name != "old" {
		t.Errorf("record is %v, want the old one", got)
	}
	err = j.Commit(t.Context(), a.DeleteOp("taken"), a.InsertOp("taken", record{"new", 2}), b.PutOp("x", record{"x", 3}))
	if err != nil {
		t.Fatal(err)
	}
	if got, _, _ := a.Get("taken"); got.Name != "new" {
		t.Errorf("record is %v, want the new one", got)
	}
}

func TestBadKeysAreRefused(t *testing.T) {
	j := openTest(t, filepath.Join(t.TempDir(), "j"))
	table := NewTable[record](j, "a")
	for _, key := range []string{"", strings.Repeat("k", bolt.MaxKeySize+1)} {
		if err := table.Put(key, record{}); cube.CodeOf(err) != cube.CodeInvalid {
			t.Errorf("key of %d bytes: %v, want Invalid", len(key), err)
		}
	}
	if err := NewTable[func()](j, "b").Put("k", nil); cube.CodeOf(err) != cube.CodeInternal {
		t.Errorf("value that is no JSON: %v, want Internal", err)
	}
}

// TestWaitingCommitsShareOneTransaction holds the committer while 50 callers queue, one
// of whom is to be refused; all others must be in the one transaction that follows.
func TestWaitingCommitsShareOneTransaction(t *testing.T) {
	path := filepath.Join(t.TempDir(), "j")
	synctest.Test(t, func(t *testing.T) {
		j, err := Open(path, Config{})
		if err != nil {
			t.Fatal(err)
		}
		table := NewTable[record](j, "a")
		release, entered := make(chan struct{}), make(chan struct{}, 1)
		held := make(chan error, 1)
		go func() {
			held <- j.update(t.Context(), func(*bolt.Tx) error {
				select {
				case entered <- struct{}{}:
				default:
				}
				<-release
				return nil
			})
		}()
		<-entered
		before := lastTransaction(t, j)
		results := make(chan error, 50)
		for i := range 50 {
			key := fmt.Sprint(i % 49) // two callers insert "0"
			go func() { results <- j.Commit(t.Context(), table.InsertOp(key, record{})) }()
		}
		synctest.Wait()
		close(release)
		if err := <-held; err != nil {
			t.Fatal(err)
		}
		refused := 0
		for range 50 {
			err := <-results
			if cube.CodeOf(err) == cube.CodeAlreadyExists {
				refused++
			} else if err != nil {
				t.Error(err)
			}
		}
		if refused != 1 {
			t.Errorf("%d commits were refused, want 1", refused)
		}
		if n := lastTransaction(t, j) - before; n != 2 {
			t.Errorf("%d transactions, want 2: the one that held and one for all that waited", n)
		}
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
}

func lastTransaction(t *testing.T, j *Journal) int {
	t.Helper()
	var id int
	if err := j.view(func(tx *bolt.Tx) error { id = tx.ID(); return nil }); err != nil {
		t.Fatal(err)
	}
	return id
}

func TestCommitHonoursItsContextUntilItBegins(t *testing.T) {
	path := filepath.Join(t.TempDir(), "j")
	synctest.Test(t, func(t *testing.T) {
		j, err := Open(path, Config{})
		if err != nil {
			t.Fatal(err)
		}
		table := NewTable[record](j, "a")
		release, entered := make(chan struct{}), make(chan struct{})
		held := make(chan error, 1)
		go func() {
			held <- j.update(t.Context(), func(*bolt.Tx) error { close(entered); <-release; return nil })
		}()
		<-entered
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := j.Commit(ctx, table.PutOp("k", record{})); cube.CodeOf(err) != cube.CodeDeadlineExceeded {
			t.Errorf("commit behind a stuck one: %v, want DeadlineExceeded", err)
		}
		close(release)
		if err := <-held; err != nil {
			t.Fatal(err)
		}
		if _, ok, _ := table.Get("k"); ok {
			t.Error("a commit that reported its deadline was made")
		}
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestClosedJournalIsUnavailable(t *testing.T) {
	j := openTest(t, filepath.Join(t.TempDir(), "j"))
	table := NewTable[record](j, "a")
	if err := errors.Join(j.Close(), j.Close()); err != nil {
		t.Fatal(err)
	}
	if err := table.Put("k", record{}); cube.CodeOf(err) != cube.CodeUnavailable {
		t.Errorf("Put = %v, want Unavailable", err)
	}
	if _, _, err := table.Get("k"); cube.CodeOf(err) != cube.CodeUnavailable {
		t.Errorf("Get = %v, want Unavailable", err)
	}
	if _, err := table.All(); cube.CodeOf(err) != cube.CodeUnavailable {
		t.Errorf("All = %v, want Unavailable", err)
	}
}

func TestSecondOpenNamesTheHolder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "j")
	openTest(t, path)
	_, err := Open(path, Config{LockTimeout: time.Millisecond})
	if cube.CodeOf(err) != cube.CodeFailedPrecondition {
		t.Fatalf("second open: %v, want FailedPrecondition", err)
	}
	if want := fmt.Sprintf("process %d", os.Getpid()); !strings.Contains(err.Error(), want) {
		t.Errorf("error %q does not name %q", err, want)
	}
}

func TestNewerSchemaIsRefusedUnchanged(t *testing.T) {
	path := filepath.Join(t.TempDir(), "j")
	newer, err := open(path, Config{}, schema{version: 9})
	if err != nil {
		t.Fatal(err)
	}
	if err := NewTable[record](newer, "a").Put("k", record{"x", 1}); err != nil {
		t.Fatal(err)
	}
	if err := newer.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path, Config{}); cube.CodeOf(err) != cube.CodeFailedPrecondition {
		t.Fatalf("open of a newer journal: %v, want FailedPrecondition", err)
	}
	again, err := open(path, Config{}, schema{version: 9})
	if err != nil {
		t.Fatal(err)
	}
	if _, ok, err := NewTable[record](again, "a").Get("k"); !ok || err != nil {
		t.Errorf("record after the refusal: %v, %v", ok, err)
	}
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestOlderSchemaIsMigratedOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "j")
	if err := openTest(t, path).Close(); err != nil {
		t.Fatal(err)
	}
	var from []int
	next := schema{version: 2, migrate: func(tx *bolt.Tx, v int) error {
		from = append(from, v)
		return applyOps(tx, []Op{{bucket: "a", key: "k", value: seal("a", "k", []byte(`{"name":"migrated"}`))}})
	}}
	for range 2 {
		j, err := open(path, Config{}, next)
		if err != nil {
			t.Fatal(err)
		}
		if got, _, err := NewTable[record](j, "a").Get("k"); got.Name != "migrated" || err != nil {
			t.Errorf("migrated record: %v, %v", got, err)
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff([]int{1}, from); diff != "" {
		t.Errorf("migrations (-want +got):\n%s", diff)
	}
}

func TestKilledWriterLosesNothingItAcknowledged(t *testing.T) {
	path := filepath.Join(t.TempDir(), "j")
	acked := make(map[string]bool)
	for round := range 3 {
		if round > 0 {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			clear(acked)
		}
		killWriter(t, path, 100*(round+1), acked)
		j := openTest(t, path)
		left, right := NewTable[record](j, "left"), NewTable[record](j, "right")
		l, err := left.All()
		if err != nil {
			t.Fatal(err)
		}
		r, err := right.All()
		if err != nil {
			t.Fatal(err)
		}
		for key := range acked {
			if l[key].Name != key {
				t.Errorf("acknowledged record %s is lost", key)
			}
		}
		if diff := cmp.Diff(l, r); diff != "" {
			t.Errorf("a commit was made by half (-left +right):\n%s", diff)
		}
		if q := j.Quarantined(); len(q) != 0 {
			t.Errorf("quarantined: %v", q)
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// killWriter starts a process that writes to the journal and kills it after n
// acknowledged commits. It adds the acknowledged keys to acked.
func killWriter(t *testing.T, path string, n int, acked map[string]bool) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), writerEnv+"="+path)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for lines := bufio.NewScanner(out); lines.Scan(); {
		acked[lines.Text()] = true
		if len(acked) == n {
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := cmd.Wait(); err == nil || len(acked) < n {
		t.Fatalf("writer ended by itself after %d commits: %v", len(acked), err)
	}
}

func TestFullDiskIsNoSpaceAndHealsWhenFreed(t *testing.T) {
	testenv.RequireRoot(t)
	root := testenv.TempRoot(t)
	if err := unix.Mount("tmpfs", root, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(root, 0); err != nil {
			t.Error(err)
		}
	})
	ballast := filepath.Join(root, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 512<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(root, "j")
	j := openTest(t, path)
	table := NewTable[record](j, "a")
	big := record{Name: strings.Repeat("x", 16<<10)}
	stored, err := 0, error(nil)
	for ; stored < 1000 && err == nil; stored++ {
		err = table.Put(fmt.Sprint(stored), big)
	}
	stored--
	if cube.CodeOf(err) != cube.CodeNoSpace {
		t.Fatalf("put on a full disk: %v, want NoSpace", err)
	}
	if all, err := table.All(); err != nil || len(all) != stored {
		t.Errorf("on the full disk: %d records and %v, want %d", len(all), err, stored)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	if err := table.Put("after", big); err != nil {
		t.Fatalf("put after space was freed: %v", err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	again := openTest(t, path)
	if all, err := NewTable[record](again, "a").All(); err != nil || len(all) != stored+1 {
		t.Errorf("after reopening: %d records and %v, want %d", len(all), err, stored+1)
	}
	if q := again.Quarantined(); len(q) != 0 {
		t.Errorf("quarantined: %v", q)
	}
	if err := again.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestJournalBehavesLikeAMap walks at random over commits and reopenings.
func TestJournalBehavesLikeAMap(t *testing.T) {
	temp := t.TempDir
	rapid.Check(t, func(t *rapid.T) {
		path := filepath.Join(temp(), "j")
		j, err := Open(path, Config{})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = j.Close() }()
		model := map[string]record{}
		keys := rapid.SampledFrom([]string{"a", "b", "c"})
		for range rapid.IntRange(1, 12).Draw(t, "steps") {
			if rapid.IntRange(0, 9).Draw(t, "reopen") == 0 {
				if err := j.Close(); err != nil {
					t.Fatal(err)
				}
				if j, err = Open(path, Config{}); err != nil {
					t.Fatal(err)
				}
			}
			model = commitBoth(t, j, model, keys)
			all, err := NewTable[record](j, "t").All()
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(model, all); diff != "" {
				t.Fatalf("journal differs from the model (-model +journal):\n%s", diff)
			}
		}
	})
}

// commitBoth makes one random commit in the journal and in the model, and returns the
// model after it.
func commitBoth(t *rapid.T, j *Journal, model map[string]record, keys *rapid.Generator[string]) map[string]record {
	table := NewTable[record](j, "t")
	next := make(map[string]record, len(model))
	for k, v := range model {
		next[k] = v
	}
	var ops []Op
	taken := false
	for range rapid.IntRange(0, 4).Draw(t, "ops") {
		key := keys.Draw(t, "key")
		v := record{rapid.String().Draw(t, "name"), rapid.Int().Draw(t, "count")}
		switch rapid.IntRange(0, 2).Draw(t, "kind") {
		case 0:
			ops, next[key] = append(ops, table.PutOp(key, v)), v
		case 1:
			ops = append(ops, table.DeleteOp(key))
			delete(next, key)
		case 2:
			_, exists := next[key]
			taken = taken || exists
			ops, next[key] = append(ops, table.InsertOp(key, v)), v
		}
	}
	err := j.Commit(context.Background(), ops...)
	if taken {
		if cube.CodeOf(err) != cube.CodeAlreadyExists {
			t.Fatalf("commit = %v, want AlreadyExists", err)
		}
		return model
	}
	if err != nil {
		t.Fatal(err)
	}
	return next
}
