package journal

import (
	"context"
	"encoding/json"
	"fmt"

	bolt "go.etcd.io/bbolt"

	cube "github.com/cubesandbox/cubelet"
)

// Table is a typed view of one bucket. T must survive a round trip through JSON.
type Table[T any] struct {
	j      *Journal
	bucket string
}

// NewTable returns the table that keeps its records in the bucket. It panics on the
// names "meta" and "quarantine", which the journal uses itself.
func NewTable[T any](j *Journal, bucket string) *Table[T] {
	if bucket == "" || bucket == metaBucket || bucket == quarantineBucket {
		panic("journal: reserved bucket name " + bucket)
	}
	return &Table[T]{j: j, bucket: bucket}
}

// Get returns the record of the key, false when there is none. A corrupt record is
// moved to quarantine and reported as CodeInternal this once.
func (t *Table[T]) Get(key string) (T, bool, error) {
	var (
		v     T
		found bool
		bad   *damaged
	)
	err := t.j.view(func(tx *bolt.Tx) error {
		b := tx.Bucket([]byte(t.bucket))
		if b == nil || key == "" {
			return nil
		}
		raw := b.Get([]byte(key))
		if raw == nil {
			return nil
		}
		found = true
		bad = t.decode(key, raw, &v)
		return nil
	})
	if err != nil {
		return v, false, fmt.Errorf("read %s %s: %w", t.bucket, key, err)
	}
	if bad == nil {
		return v, found, nil
	}
	var zero T
	t.j.quarantine([]damaged{*bad})
	return zero, false, cube.Errorf(cube.CodeInternal, "record %s of %s is corrupt: %s", key, t.bucket, bad.reason)
}

// All returns every readable record by key. Corrupt ones are moved to quarantine and
// logged; they are no error.
func (t *Table[T]) All() (map[string]T, error) {
	all := make(map[string]T)
	var bad []damaged
	err := t.j.view(func(tx *bolt.Tx) error {
		b := tx.Bucket([]byte(t.bucket))
		if b == nil {
			return nil
		}
		return b.ForEach(func(k, raw []byte) error {
			var v T
			if d := t.decode(string(k), raw, &v); d != nil {
				bad = append(bad, *d)
				return nil
			}
			all[string(k)] = v
			return nil
		})
	})
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", t.bucket, err)
	}
	t.j.quarantine(bad)
	return all, nil
}

// Put stores one record durably, see Journal.Commit.
func (t *Table[T]) Put(key string, v T) error {
	return t.j.Commit(context.Background(), t.PutOp(key, v))
}

// Delete removes one record durably; a key without a record is no error.
func (t *Table[T]) Delete(key string) error {
	return t.j.Commit(context.Background(), t.DeleteOp(key))
}

// PutOp stores the record under the key, whether or not there is one.
func (t *Table[T]) PutOp(key string, v T) Op {
	op := t.op(key)
	payload, err := json.Marshal(v)
	if err != nil && op.err == nil {
		op.err = cube.Errorf(cube.CodeInternal, "encode %s %s: %w", t.bucket, key, err)
	}
	op.value = seal(t.bucket, key, payload)
	return op
}

// InsertOp stores the record and fails the commit with AlreadyExists when the key is
// taken.
func (t *Table[T]) InsertOp(key string, v T) Op {
	op := t.PutOp(key, v)
	op.insert = true
	return op
}

// DeleteOp removes the key's record if there is one.
func (t *Table[T]) DeleteOp(key string) Op { return t.op(key) }

func (t *Table[T]) op(key string) Op {
	op := Op{bucket: t.bucket, key: key}
	if key == "" || len(key) > bolt.MaxKeySize {
		op.err = cube.Errorf(cube.CodeInvalid, "%s: a key has 1 to %d bytes, not %d", t.bucket, bolt.MaxKeySize, len(key))
	}
	return op
}

func (t *Table[T]) decode(key string, raw []byte, v *T) *damaged {
	payload, err := unseal(t.bucket, key, raw)
	if err == nil {
		err = json.Unmarshal(payload, v)
	}
	if err == nil {
		return nil
	}
	return newDamaged(t.bucket, key, raw, err)
}
