package cubetest

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	cube "github.com/cubesandbox/cubelet"
)

// templates implements cube.Templates.
type templates struct{ n *Node }

// Create implements cube.Templates.
func (s templates) Create(ctx context.Context, spec cube.TemplateSpec, progress func(cube.TemplateProgress)) (cube.Template, error) {
	if err := s.n.begin(ctx, "template create"); err != nil {
		return cube.Template{}, err
	}
	for i, p := range []cube.TemplateProgress{
		{Stage: "pull", Message: "layer 1 of 1", Total: 2 << 20},
		{Stage: "pull", Message: "layer 1 of 1", Done: 2 << 20, Total: 2 << 20},
		{Stage: "boot"},
		{Stage: "done"},
	} {
		p.Elapsed = time.Duration(i) * time.Second
		progress(p)
	}
	id := cmp.Or(spec.ID, "tpl-new00")
	s.n.mu.Lock()
	_, exists := s.n.templates[id]
	s.n.mu.Unlock()
	if exists {
		return cube.Template{}, cube.Errorf(cube.CodeAlreadyExists, "template %s exists", id)
	}
	var names []string
	if spec.Name != "" {
		names = []string{spec.Name}
	}
	s.n.AddTemplate(id, names...)
	s.n.mu.Lock()
	defer s.n.mu.Unlock()
	tpl := s.n.templates[id]
	tpl.Image = cmp.Or(spec.Image, spec.ArchivePath)
	tpl.StartCommand, tpl.Ready = spec.StartCommand, spec.Ready
	tpl.DiskMiB = cmp.Or(spec.DiskMiB, tpl.DiskMiB)
	tpl.Resources.VCPUs = cmp.Or(spec.Resources.VCPUs, tpl.Resources.VCPUs)
	tpl.Resources.MemoryMiB = cmp.Or(spec.Resources.MemoryMiB, tpl.Resources.MemoryMiB)
	tpl.Sizes = []cube.Resources{tpl.Resources}
	for _, k := range slices.Sorted(maps.Keys(spec.Env)) {
		tpl.Config.Env = append(tpl.Config.Env, k+"="+spec.Env[k])
	}
	s.n.templates[id] = tpl
	return tpl, nil
}

// Get implements cube.Templates.
func (s templates) Get(ctx context.Context, ref string) (cube.Template, error) {
	if err := s.n.begin(ctx, "template get"); err != nil {
		return cube.Template{}, err
	}
	s.n.mu.Lock()
	defer s.n.mu.Unlock()
	return s.n.findTemplate(ref)
}

// List implements cube.Templates.
func (s templates) List(ctx context.Context) ([]cube.Template, error) {
	if err := s.n.begin(ctx, "template list"); err != nil {
		return nil, err
	}
	s.n.mu.Lock()
	defer s.n.mu.Unlock()
	all := slices.Collect(maps.Values(s.n.templates))
	slices.SortFunc(all, func(a, b cube.Template) int { return cmp.Compare(a.ID, b.ID) })
	return all, nil
}

// Delete implements cube.Templates.
func (s templates) Delete(ctx context.Context, ref string, force bool) error {
	if err := s.n.begin(ctx, "template delete"); err != nil {
		return err
	}
	s.n.mu.Lock()
	defer s.n.mu.Unlock()
	tpl, err := s.n.findTemplate(ref)
	if err != nil {
		return err
	}
	var users []string
	for id, sb := range s.n.sandboxes {
		if sb.TemplateID == tpl.ID {
			users = append(users, id)
		}
	}
	if len(users) > 0 && !force {
		slices.Sort(users)
		return &cube.Error{
			Code: cube.CodeFailedPrecondition, Op: "delete template", ID: tpl.ID,
			Hint: "Delete the sandboxes first.",
			Err:  fmt.Errorf("used by sandboxes %s", strings.Join(users, ", ")),
		}
	}
	delete(s.n.templates, tpl.ID)
	return nil
}
