package journal

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"

	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"

	"github.com/cubesandbox/cubelet/internal/durable"
)

const (
	asideInfix     = ".corrupt-"
	repairedSuffix = ".repaired"
	asideTime      = "20060102T150405.000000000Z"
)

// recoverDamage turns a panic into an error. bbolt panics on pages that make no sense.
func recoverDamage(err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("database is damaged: %v", p)
	}
}

// openDB checks and opens the database. Damage tells what is wrong with its content,
// err that it could not be looked at.
func openDB(path string) (db *bolt.DB, damage, err error) {
	b, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, err
	}
	if len(b) > 0 { // bbolt makes a new database out of an empty file
		if damage := scanFile(b, func(string, []byte, []byte) {}); damage != nil {
			return nil, damage, nil
		}
	}
	db, err = rawOpen(path)
	if err != nil && !isEnvironment(err) {
		return nil, err, nil
	}
	return db, nil, err
}

// isTorn reports whether one of the two meta pages is invalid.
func isTorn(path string) (bool, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return false, err
	}
	_, both, _ := findMeta(b)
	return !both, nil
}

// reportTorn records that a meta page was invalid. A power failure in the middle of a
// commit that nobody was answered leaves that behind, but so does a fault of the disk in
// the last commit that was answered.
func (j *Journal) reportTorn(db *bolt.DB) error {
	const reason = "one of the two meta pages is invalid: the last commit before the stop may be missing"
	j.log.Error("journal: " + reason)
	return db.Update(func(tx *bolt.Tx) error {
		return addQuarantine(tx, Quarantine{Bucket: metaBucket, Reason: reason, Time: time.Now().UTC()})
	})
}

// rawOpen opens the file with bbolt. After a panic inside bbolt the file is closed, so
// that its lock does not outlive it.
func rawOpen(path string) (db *bolt.DB, err error) {
	var file *os.File
	defer func() {
		if err != nil && file != nil {
			_ = file.Close() // a second close when bbolt did it: nothing to report
		}
	}()
	defer recoverDamage(&err)
	return bolt.Open(path, 0o600, &bolt.Options{
		Timeout: openTimeout, FreelistType: bolt.FreelistMapType, NoStatistics: true,
		OpenFile: func(name string, flag int, perm os.FileMode) (*os.File, error) {
			var err error
			file, err = os.OpenFile(name, flag, perm)
			return file, err
		},
	})
}

// isEnvironment tells errors of the host, after which the file may be fine, from those
// about the file's content.
func isEnvironment(err error) bool {
	var errno syscall.Errno
	return errors.As(err, &errno) || errors.Is(err, bolterrors.ErrTimeout)
}

// replaceBroken puts a new database in the place of a broken one, with the records that
// can be read and whose checksum is right, and leaves the broken file aside. The new one
// is complete before it gets the name: a daemon that dies on the way changed nothing.
func (j *Journal) replaceBroken(damage error) (*bolt.DB, error) {
	broken, err := os.ReadFile(j.path)
	if err != nil {
		return nil, err
	}
	now := time.Now().UTC()
	aside, repaired := j.path+asideInfix+now.Format(asideTime), j.path+repairedSuffix
	records, version := salvage(broken)
	reason := fmt.Sprintf("database file is damaged (%v); %d records were carried over", damage, len(records))
	j.log.Error("journal is damaged and is set aside", "aside", aside, "err", damage, "carriedOver", len(records))
	if version != nil {
		records = append(records, Op{bucket: metaBucket, key: schemaKey, value: version})
	}
	err = writeRepaired(repaired, records, Quarantine{Path: aside, Reason: reason, Time: now})
	if err != nil {
		return nil, fmt.Errorf("write repaired database: %w", err)
	}
	if err := os.Link(j.path, aside); err != nil {
		return nil, fmt.Errorf("set aside: %w", err)
	}
	if err := durable.Rename(repaired, j.path); err != nil {
		return nil, err
	}
	db, newDamage, err := openDB(j.path)
	return db, errors.Join(newDamage, err)
}

// writeRepaired makes a database with the records and a word about where they are from.
func writeRepaired(path string, records []Op, q Quarantine) error {
	if err := durable.Remove(path); err != nil { // of a daemon that died here
		return err
	}
	db, err := rawOpen(path)
	if err != nil {
		return err
	}
	err = db.Update(func(tx *bolt.Tx) error {
		if err := applyOps(tx, records); err != nil {
			return err
		}
		return addQuarantine(tx, q)
	})
	return errors.Join(err, db.Close())
}

// salvage reads what it can of a damaged file: the records with a right checksum, and
// the sealed schema version, nil when it is lost. Both are parts of b.
func salvage(b []byte) (records []Op, version []byte) {
	_ = scanFile(b, func(bucket string, key, value []byte) { // its errors are why we are here
		switch bucket {
		case metaBucket:
			if _, err := unsealVersion(value); err == nil && string(key) == schemaKey {
				version = value
			}
		case quarantineBucket:
		default:
			if _, err := unseal(bucket, string(key), value); err == nil {
				records = append(records, Op{bucket: bucket, key: string(key), value: value})
			}
		}
	})
	return records, version
}
