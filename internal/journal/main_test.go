package journal

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// writerEnv makes this test binary a program that commits until it is killed.
const writerEnv = "CUBE_JOURNAL_WRITER"

func TestMain(m *testing.M) {
	if path := os.Getenv(writerEnv); path != "" {
		if err := writeUntilKilled(path); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

type record struct {
	Name  string `json:"name"`
	Count int    `json:"count"`
}

// writeUntilKilled prints each key after the commit that stored it in two tables.
func writeUntilKilled(path string) error {
	j, err := Open(path, Config{})
	if err != nil {
		return err
	}
	left, right := NewTable[record](j, "left"), NewTable[record](j, "right")
	errs := make(chan error)
	for w := range 8 {
		go func() {
			for i := 0; ; i++ {
				key := fmt.Sprintf("w%d-%d", w, i)
				err := j.Commit(context.Background(), left.InsertOp(key, record{key, i}), right.PutOp(key, record{key, i}))
				if err == nil {
					_, err = fmt.Println(key)
				}
				if err != nil {
					errs <- err
					return
				}
			}
		}()
	}
	return <-errs
}

func openTest(t *testing.T, path string) *Journal {
	t.Helper()
	j, err := Open(path, Config{LockTimeout: 2 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
	return j
}
