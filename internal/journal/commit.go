package journal

import (
	"context"
	"errors"
	"fmt"
	"time"

	bolt "go.etcd.io/bbolt"

	cube "github.com/cubesandbox/cubelet"
)

// maxBatch bounds how many requests share one transaction, and so one sync.
const maxBatch = 256

// request is one caller's change. apply may run more than once and must not keep
// anything of a run.
type request struct {
	apply func(tx *bolt.Tx) error
	done  chan error // capacity 1
}

// Op is one change of one record. Make it with a table's PutOp, InsertOp or DeleteOp.
type Op struct {
	bucket, key string
	value       []byte // sealed; nil deletes
	insert      bool
	err         error // why the op could not be made
}

// Commit makes all changes or none and returns when they are durable. The context is
// only looked at until the commit has begun: an error of the context means that nothing
// was changed. Codes: AlreadyExists (an InsertOp's key is taken), Invalid (key),
// NoSpace, Unavailable (closed), Internal.
func (j *Journal) Commit(ctx context.Context, ops ...Op) error {
	for _, op := range ops {
		if op.err != nil {
			return op.err
		}
	}
	if len(ops) == 0 {
		return nil
	}
	return j.update(ctx, func(tx *bolt.Tx) error { return applyOps(tx, ops) })
}

func applyOps(tx *bolt.Tx, ops []Op) error {
	for _, op := range ops {
		b, err := tx.CreateBucketIfNotExists([]byte(op.bucket))
		if err != nil {
			return fmt.Errorf("bucket %s: %w", op.bucket, err)
		}
		if op.insert && b.Get([]byte(op.key)) != nil {
			return &cube.Error{Code: cube.CodeAlreadyExists, Op: "insert into " + op.bucket, ID: op.key}
		}
		if op.value == nil {
			err = b.Delete([]byte(op.key))
		} else {
			err = b.Put([]byte(op.key), op.value)
		}
		if err != nil {
			return fmt.Errorf("%s %s: %w", op.bucket, op.key, err)
		}
	}
	return nil
}

// update hands the change to the committer and waits for its end.
func (j *Journal) update(ctx context.Context, apply func(tx *bolt.Tx) error) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("journal commit: %w", err)
	}
	r := &request{apply: apply, done: make(chan error, 1)}
	select {
	case j.requests <- r:
		return <-r.done
	case <-ctx.Done():
		return fmt.Errorf("journal commit: %w", ctx.Err())
	case <-j.stop:
		return errUnavailable()
	}
}

// commitLoop commits what callers hand in. Those that come while a sync is under way
// form the next batch, so a lone caller never waits for company.
func (j *Journal) commitLoop() {
	defer close(j.stopped)
	for {
		select {
		case <-j.stop:
			return
		case r := <-j.requests:
			j.commitBatch(j.gather([]*request{r}))
		}
	}
}

func (j *Journal) gather(batch []*request) []*request {
	for len(batch) < maxBatch {
		select {
		case r := <-j.requests:
			batch = append(batch, r)
		default:
			return batch
		}
	}
	return batch
}

// commitBatch commits the batch without those requests that fail by themselves. Nobody
// is answered before the transaction is durable, since a refusal (a key that is taken)
// may rest on another request of the same batch.
func (j *Journal) commitBatch(batch []*request) {
	refused := make(map[*request]error)
	for {
		bad, err := j.tryBatch(batch, refused)
		if bad != nil {
			refused[bad] = err
			continue
		}
		for _, r := range batch {
			switch own := refused[r]; {
			case err != nil:
				r.done <- fmt.Errorf("journal commit: %w", err)
			default:
				r.done <- own
			}
		}
		return
	}
}

// tryBatch runs one transaction. When a request's own change fails, that request is
// returned with its error and the transaction is rolled back.
func (j *Journal) tryBatch(batch []*request, refused map[*request]error) (bad *request, err error) {
	j.mu.RLock()
	db := j.db
	j.mu.RUnlock()
	if db == nil {
		return nil, errUnavailable()
	}
	if len(refused) == len(batch) {
		return nil, nil
	}
	err = safeUpdate(db, func(tx *bolt.Tx) error {
		for _, r := range batch {
			if refused[r] != nil {
				continue
			}
			if err := r.apply(tx); err != nil {
				bad = r
				return err
			}
		}
		return nil
	})
	if err != nil && bad == nil {
		j.reopen(err)
	}
	return bad, err
}

func safeUpdate(db *bolt.DB, fn func(tx *bolt.Tx) error) (err error) {
	defer recoverDamage(&err)
	return db.Update(fn)
}

// reopen loads the database anew after a commit that failed in the file system. bbolt
// rolls such a commit back in memory only: when the sync of the meta page failed, the
// page may be in place all the same, and the free list in memory would then hand out
// pages that are in use.
func (j *Journal) reopen(cause error) {
	j.log.Warn("journal commit not written, loading the file anew", "err", cause)
	j.mu.Lock()
	defer j.mu.Unlock()
	err := closeWithin(j.db, openTimeout)
	j.db = nil
	if err == nil {
		var damage error
		j.db, damage, err = openDB(j.path)
		err = errors.Join(damage, err)
	}
	if err != nil {
		j.log.Error("journal is unusable until the daemon restarts", "err", err)
	}
}

// closeWithin closes db, which a panic inside bbolt may have left locked.
func closeWithin(db *bolt.DB, d time.Duration) error {
	closed := make(chan error, 1)
	go func() { closed <- db.Close() }()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case err := <-closed:
		return err
	case <-timer.C:
		return errors.New("database does not close")
	}
}
