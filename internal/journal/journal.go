package journal

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	bolt "go.etcd.io/bbolt"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/durable"
)

// Config configures a journal.
type Config struct {
	Log *slog.Logger
	// LockTimeout bounds the wait for a daemon that is going away. Zero: 5 s.
	LockTimeout time.Duration
}

// Journal is an open journal. Its methods and those of its tables may be used at the
// same time.
type Journal struct {
	path   string
	log    *slog.Logger
	schema schema
	lock   *os.File

	requests chan *request // accepted by the committer
	stop     chan struct{} // closed by Close
	stopped  chan struct{} // closed by the committer when it ended
	closing  sync.Once
	closeErr error

	mu sync.RWMutex // guards the pointer; held for reading while a transaction is open
	db *bolt.DB     // nil after a failure that only a restart repairs
}

const (
	metaBucket       = "meta"
	schemaKey        = "schema"
	quarantineBucket = "quarantine"
	openTimeout      = 5 * time.Second
)

// schema is the version of the records that this build writes, and how it makes them
// out of older ones. migrate runs in the transaction that sets the new version.
type schema struct {
	version int
	migrate func(tx *bolt.Tx, from int) error
}

func currentSchema() schema {
	return schema{version: 1, migrate: func(*bolt.Tx, int) error { return nil }}
}

// Open opens the journal and makes it when there is none. The caller closes it.
// Codes: FailedPrecondition when another process has it open or when a newer Cubelet
// wrote it, NoSpace, Internal.
func Open(path string, cfg Config) (*Journal, error) {
	return open(path, cfg, currentSchema())
}

func open(path string, cfg Config, s schema) (*Journal, error) {
	if cfg.LockTimeout == 0 {
		cfg.LockTimeout = openTimeout
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if err := durable.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	lock, err := acquireLock(path+".lock", cfg.LockTimeout)
	if err != nil {
		return nil, err
	}
	j := &Journal{
		path: path, log: cfg.Log, schema: s, lock: lock,
		requests: make(chan *request), stop: make(chan struct{}), stopped: make(chan struct{}),
	}
	if err := j.load(); err != nil {
		return nil, errors.Join(fmt.Errorf("open journal %s: %w", path, err), lock.Close())
	}
	go j.commitLoop()
	if err := j.quarantineCorrupt(); err != nil {
		return nil, errors.Join(fmt.Errorf("open journal %s: %w", path, err), j.Close())
	}
	return j, nil
}

// load opens the database, or sets a broken one aside and starts a new one, and brings
// it to the schema of this build.
func (j *Journal) load() error {
	db, damage, err := openDB(j.path)
	if err != nil {
		return err
	}
	if damage != nil {
		if db, err = j.replaceBroken(damage); err != nil {
			return err
		}
	}
	torn, err := isTorn(j.path) // before the first commit, which writes the older meta page
	if err == nil {
		err = j.upgrade(db)
	}
	if err == nil && torn {
		err = j.reportTorn(db)
	}
	if err != nil {
		return errors.Join(err, db.Close())
	}
	j.db = db
	return durable.SyncDir(filepath.Dir(j.path))
}

// upgrade checks the schema version and migrates older records. A version that is
// damaged counts as this build's, since the records carry their own checksums.
func (j *Journal) upgrade(db *bolt.DB) error {
	var stored []byte
	err := db.View(func(tx *bolt.Tx) error {
		if meta := tx.Bucket([]byte(metaBucket)); meta != nil {
			stored = bytes.Clone(meta.Get([]byte(schemaKey)))
		}
		return nil
	})
	if err != nil {
		return err
	}
	from, bad := j.schema.version, (*damaged)(nil)
	if stored != nil {
		if from, err = unsealVersion(stored); err != nil {
			from, bad = j.schema.version, newDamaged(metaBucket, schemaKey, stored, err)
		}
	}
	switch {
	case from > j.schema.version:
		return cube.Errorf(cube.CodeFailedPrecondition,
			"its schema is version %d and this build knows only up to %d", from, j.schema.version).
			WithHint("Start the newer Cubelet that wrote it, or move the file away to start without its sandboxes.")
	case from == j.schema.version && stored != nil && bad == nil:
		return nil
	}
	return db.Update(func(tx *bolt.Tx) error { return j.writeSchema(tx, from, bad) })
}

func unsealVersion(stored []byte) (int, error) {
	text, err := unseal(metaBucket, schemaKey, stored)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(string(text))
}

// writeSchema migrates from the version and sets this build's. bad is the stored version
// when it was damaged.
func (j *Journal) writeSchema(tx *bolt.Tx, from int, bad *damaged) error {
	if bad != nil {
		j.log.Error("journal: the schema version is damaged", "reason", bad.reason)
		if err := moveDamaged(tx, *bad, time.Now().UTC()); err != nil {
			return err
		}
	}
	if from < j.schema.version {
		if err := j.schema.migrate(tx, from); err != nil {
			return fmt.Errorf("migrate from schema %d: %w", from, err)
		}
		j.log.Info("journal migrated", "from", from, "to", j.schema.version)
	}
	version := seal(metaBucket, schemaKey, []byte(strconv.Itoa(j.schema.version)))
	return applyOps(tx, []Op{{bucket: metaBucket, key: schemaKey, value: version}})
}

// Close waits for the commits under way and closes the file. Later calls of any method
// fail with CodeUnavailable; closing twice is allowed.
func (j *Journal) Close() error {
	j.closing.Do(func() {
		close(j.stop)
		<-j.stopped
		j.mu.Lock()
		defer j.mu.Unlock()
		if j.db != nil {
			j.closeErr = j.db.Close()
			j.db = nil
		}
		j.closeErr = errors.Join(j.closeErr, j.lock.Close())
	})
	return j.closeErr
}

// view runs fn in a read transaction. A panic of bbolt, which is how it reports a
// damaged page, becomes an error.
func (j *Journal) view(fn func(tx *bolt.Tx) error) (err error) {
	j.mu.RLock()
	defer j.mu.RUnlock()
	if j.db == nil {
		return errUnavailable()
	}
	defer recoverDamage(&err)
	return j.db.View(fn)
}

func errUnavailable() error {
	return cube.Errorf(cube.CodeUnavailable, "the journal is closed")
}

// userBuckets calls fn for each bucket that belongs to a table.
func userBuckets(tx *bolt.Tx, fn func(name string, b *bolt.Bucket) error) error {
	return tx.ForEach(func(name []byte, b *bolt.Bucket) error {
		if string(name) == metaBucket || string(name) == quarantineBucket {
			return nil
		}
		return fn(string(name), b)
	})
}
