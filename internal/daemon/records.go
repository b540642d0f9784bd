package daemon

import (
	"context"

	"github.com/cubesandbox/cubelet/internal/journal"
	"github.com/cubesandbox/cubelet/internal/sandbox"
)

// records keeps the engine's records and keys in the journal.
type records struct {
	journal   *journal.Journal
	sandboxes *journal.Table[sandbox.Record]
	keys      *journal.Table[sandbox.Key]
}

func newRecords(j *journal.Journal) *records {
	return &records{
		journal:   j,
		sandboxes: journal.NewTable[sandbox.Record](j, "sandboxes"),
		keys:      journal.NewTable[sandbox.Key](j, "sandbox-keys"),
	}
}

// Load implements sandbox.Records.
func (r *records) Load(context.Context) (map[string]sandbox.Record, map[string]sandbox.Key, error) {
	recs, err := r.sandboxes.All()
	if err != nil {
		return nil, nil, err
	}
	keys, err := r.keys.All()
	return recs, keys, err
}

// Create implements sandbox.Records.
func (r *records) Create(ctx context.Context, rec sandbox.Record, key string, k sandbox.Key) error {
	ops := []journal.Op{r.sandboxes.InsertOp(rec.ID, rec)}
	if key != "" {
		ops = append(ops, r.keys.PutOp(key, k))
	}
	return r.journal.Commit(ctx, ops...)
}

// Put implements sandbox.Records.
func (r *records) Put(ctx context.Context, rec sandbox.Record) error {
	return r.journal.Commit(ctx, r.sandboxes.PutOp(rec.ID, rec))
}

// Delete implements sandbox.Records.
func (r *records) Delete(ctx context.Context, id, key string, k sandbox.Key) error {
	ops := []journal.Op{r.sandboxes.DeleteOp(id)}
	switch {
	case key == "":
	case k.SandboxID == "":
		ops = append(ops, r.keys.DeleteOp(key))
	default:
		ops = append(ops, r.keys.PutOp(key, k))
	}
	return r.journal.Commit(ctx, ops...)
}

// DropKeys implements sandbox.Records.
func (r *records) DropKeys(ctx context.Context, keys []string) error {
	ops := make([]journal.Op, 0, len(keys))
	for _, k := range keys {
		ops = append(ops, r.keys.DeleteOp(k))
	}
	return r.journal.Commit(ctx, ops...)
}
