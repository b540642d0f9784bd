package daemon

import (
	"context"

	"github.com/cubesandbox/cubelet/internal/journal"
	"github.com/cubesandbox/cubelet/internal/template"
)

// known marks a template whose build was committed.
type known struct {
	ID string `json:"id"`
}

// templateRecords keeps in the journal what is not in a template's own directory.
type templateRecords struct {
	journal *journal.Journal
	known   *journal.Table[known]
	names   *journal.Table[string]
	keys    *journal.Table[template.Key]
}

func newTemplateRecords(j *journal.Journal) *templateRecords {
	return &templateRecords{
		journal: j,
		known:   journal.NewTable[known](j, "templates"),
		names:   journal.NewTable[string](j, "template-names"),
		keys:    journal.NewTable[template.Key](j, "template-keys"),
	}
}

// Load implements template.Records.
func (r *templateRecords) Load(context.Context) (template.Book, error) {
	b := template.Book{Known: map[string]bool{}}
	all, err := r.known.All()
	if err != nil {
		return b, err
	}
	for id := range all {
		b.Known[id] = true
	}
	if b.Names, err = r.names.All(); err != nil {
		return b, err
	}
	b.Keys, err = r.keys.All()
	return b, err
}

// Commit implements template.Records.
func (r *templateRecords) Commit(ctx context.Context, e template.Entry) error {
	ops := []journal.Op{r.known.PutOp(e.ID, known{e.ID})}
	if e.Name != "" {
		ops = append(ops, r.names.PutOp(e.Name, e.ID))
	}
	if e.Key != "" {
		ops = append(ops, r.keys.PutOp(e.Key, template.Key{Digest: e.KeyDigest, TemplateID: e.ID}))
	}
	return r.journal.Commit(ctx, ops...)
}

// Forget implements template.Records.
func (r *templateRecords) Forget(ctx context.Context, id string, names, keys []string) error {
	ops := []journal.Op{r.known.DeleteOp(id)}
	for _, n := range names {
		ops = append(ops, r.names.DeleteOp(n))
	}
	for _, k := range keys {
		ops = append(ops, r.keys.DeleteOp(k))
	}
	return r.journal.Commit(ctx, ops...)
}
