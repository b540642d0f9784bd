package sandbox

import (
	"cmp"
	"context"
	"encoding/base64"
	"slices"
	"strconv"
	"strings"
	"time"

	cube "github.com/cubesandbox/cubelet"
)

const (
	defaultPage = 100
	maxPage     = 1000
)

// compareAge orders records by creation time, then ID.
func compareAge(a, b *Record) int {
	return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID))
}

// List implements cube.Sandboxes. The page token names the last record of the page
// before, so that a page stays right when sandboxes come and go in between.
func (m *Manager) List(ctx context.Context, f cube.ListFilter) (cube.SandboxPage, error) {
	after, err := decodeToken(f.PageToken)
	if err != nil {
		return cube.SandboxPage{}, err
	}
	switch {
	case f.PageSize < 0 || f.PageSize > maxPage:
		return cube.SandboxPage{}, cube.InvalidField("page_size", "must be between 0 and %d", maxPage)
	case f.PageSize == 0:
		f.PageSize = defaultPage
	}
	templateID := ""
	if f.TemplateRef != "" {
		templateID, err = m.cfg.Templates.Resolve(ctx, f.TemplateRef)
		switch {
		case cube.IsNotFound(err):
			return cube.SandboxPage{}, nil
		case err != nil:
			return cube.SandboxPage{}, err
		}
	}
	var page cube.SandboxPage
	for _, r := range m.records() {
		if !matches(r, f, templateID) {
			continue
		}
		page.Total++
		if compareAge(r, after) <= 0 {
			continue
		}
		if len(page.Sandboxes) == f.PageSize {
			if page.NextPageToken == "" {
				page.NextPageToken = encodeToken(page.Sandboxes[f.PageSize-1])
			}
			continue
		}
		page.Sandboxes = append(page.Sandboxes, r.sandbox())
	}
	return page, nil
}

func matches(r *Record, f cube.ListFilter, templateID string) bool {
	if len(f.Phases) > 0 && !slices.Contains(f.Phases, r.Phase) {
		return false
	}
	if templateID != "" && r.Plan.Image.TemplateID != templateID {
		return false
	}
	for k, v := range f.Metadata {
		if got, ok := r.Spec.Metadata[k]; !ok || got != v {
			return false
		}
	}
	return true
}

func encodeToken(s cube.Sandbox) string {
	return base64.RawURLEncoding.EncodeToString([]byte(strconv.FormatInt(s.CreatedAt.UnixNano(), 10) + "/" + s.ID))
}

// decodeToken returns a record with the position that the token names.
func decodeToken(t string) (*Record, error) {
	if t == "" {
		return &Record{}, nil
	}
	b, err := base64.RawURLEncoding.DecodeString(t)
	nano, id, ok := strings.Cut(string(b), "/")
	n, perr := strconv.ParseInt(nano, 10, 64)
	if err != nil || !ok || perr != nil {
		return nil, cube.InvalidField("page_token", "is not a token of an earlier page")
	}
	return &Record{ID: id, CreatedAt: time.Unix(0, n)}, nil
}
