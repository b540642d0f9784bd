package journal

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	bolt "go.etcd.io/bbolt"
)

// Quarantine is something that could not be read and was put aside.
type Quarantine struct {
	Bucket string    `json:"bucket,omitempty"` // table of the record
	Key    string    `json:"key,omitempty"`    // key of the record
	Data   []byte    `json:"data,omitempty"`   // the record's bytes as they were found
	Path   string    `json:"path,omitempty"`   // set instead: a whole database file
	Reason string    `json:"reason"`
	Time   time.Time `json:"time"` // when it was found
}

// damaged is a corrupt record that is still in its table.
type damaged struct {
	bucket, key string
	raw         []byte // a copy, valid after the transaction
	reason      string
}

func newDamaged(bucket, key string, raw []byte, reason error) *damaged {
	return &damaged{bucket: bucket, key: key, raw: bytes.Clone(raw), reason: reason.Error()}
}

// Quarantined lists what was put aside, by this daemon and by earlier ones, oldest
// first. Entries stay until a person removes them.
func (j *Journal) Quarantined() []Quarantine {
	var list []Quarantine
	err := j.view(func(tx *bolt.Tx) error {
		b := tx.Bucket([]byte(quarantineBucket))
		if b == nil {
			return nil
		}
		return b.ForEach(func(k, raw []byte) error {
			var q Quarantine
			if err := json.Unmarshal(raw, &q); err != nil {
				q = Quarantine{Bucket: quarantineBucket, Key: string(k), Data: bytes.Clone(raw), Reason: err.Error()}
			}
			list = append(list, q)
			return nil
		})
	})
	if err != nil {
		j.log.Error("journal quarantine is unreadable", "err", err)
	}
	list = append(list, j.asideFiles(list)...)
	slices.SortStableFunc(list, func(a, b Quarantine) int { return a.Time.Compare(b.Time) })
	return list
}

// asideFiles lists database files that lie aside without an entry in known: the daemon
// died between setting them aside and recording it.
func (j *Journal) asideFiles(known []Quarantine) []Quarantine {
	paths, err := filepath.Glob(j.path + asideInfix + "*")
	if err != nil {
		return nil
	}
	var list []Quarantine
	for _, p := range paths {
		if slices.ContainsFunc(known, func(q Quarantine) bool { return q.Path == p }) {
			continue
		}
		at, err := time.Parse(asideTime, strings.TrimPrefix(p, j.path+asideInfix))
		if err != nil {
			at = time.Time{}
		}
		list = append(list, Quarantine{Path: p, Reason: "database file was set aside", Time: at})
	}
	return list
}

// quarantineCorrupt checks the envelope of every record.
func (j *Journal) quarantineCorrupt() error {
	var bad []damaged
	err := j.view(func(tx *bolt.Tx) error {
		return userBuckets(tx, func(name string, b *bolt.Bucket) error {
			return b.ForEach(func(k, raw []byte) error {
				if _, err := unseal(name, string(k), raw); err != nil {
					bad = append(bad, *newDamaged(name, string(k), raw, err))
				}
				return nil
			})
		})
	})
	j.quarantine(bad)
	return err
}

// quarantine moves the records out of their tables. When that cannot be written they
// stay where they are and are found again by the next read: not worth failing for.
func (j *Journal) quarantine(bad []damaged) {
	if len(bad) == 0 {
		return
	}
	now := time.Now().UTC()
	for _, d := range bad {
		j.log.Error("journal record is corrupt", "bucket", d.bucket, "key", d.key, "bytes", len(d.raw), "reason", d.reason)
	}
	err := j.update(context.Background(), func(tx *bolt.Tx) error {
		for _, d := range bad {
			if err := moveDamaged(tx, d, now); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		j.log.Error("corrupt journal records stay in place", "err", err)
	}
}

// moveDamaged does nothing when the record was replaced since it was read.
func moveDamaged(tx *bolt.Tx, d damaged, now time.Time) error {
	b := tx.Bucket([]byte(d.bucket))
	if b == nil || !bytes.Equal(b.Get([]byte(d.key)), d.raw) {
		return nil
	}
	q := Quarantine{Bucket: d.bucket, Key: d.key, Data: d.raw, Reason: d.reason, Time: now}
	if err := addQuarantine(tx, q); err != nil {
		return err
	}
	return b.Delete([]byte(d.key))
}

func addQuarantine(tx *bolt.Tx, q Quarantine) error {
	b, err := tx.CreateBucketIfNotExists([]byte(quarantineBucket))
	if err != nil {
		return err
	}
	seq, err := b.NextSequence()
	if err != nil {
		return err
	}
	raw, err := json.Marshal(q)
	if err != nil {
		return err
	}
	return b.Put(fmt.Appendf(nil, "%016d", seq), raw)
}
