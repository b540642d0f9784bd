// Package template builds templates and hands out their images: from an OCI image to a
// root disk, a first boot, a start command, and a memory image that sandboxes begin with.
//
// A template is a directory whose manifest is written last and renamed away first:
// whatever has no manifest was never a template or is none any more. Memory images of
// other sizes are made from the same disks when they are first asked for.
package template

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/durable"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// Config is what a Manager is made of. Every field is required unless it says otherwise.
type Config struct {
	Dir     string // of the templates, on the pool; each has a directory of its ID
	Images  Images
	VMMs    VMMs
	Network Network
	Disks   Disks
	Guest   Guest
	Records Records
	// Machine is what memory images depend on; those of another machine are made anew.
	Machine        cube.MachineInfo
	Kernel, Initrd string // paths of the guest's kernel and initial RAM file system
	Cmdline        string
	Nameservers    []string // of guests while templates are built; may be empty
	Limits         func(cube.Resources) vmm.Limits
	// BootTimeout bounds a first boot. Zero: 5 minutes, for hosts that emulate the CPU.
	BootTimeout time.Duration
	// Bounds are the sizes of machines. Zero: four vCPUs per CPU and the host's memory.
	Bounds Bounds
	Log    *slog.Logger
}

const (
	defaultBootTimeout = 5 * time.Minute
	// undoTimeout bounds an unwind: killing a large guest takes seconds.
	undoTimeout = 2 * time.Minute
)

var (
	errAbandoned = errors.New("no caller waits for the build any more")
	errClosed    = cube.Errorf(cube.CodeUnavailable, "the daemon is shutting down")
)

// Manager implements cube.Templates and the engine's Templates.
type Manager struct {
	cfg  Config
	ctx  context.Context // ends when the manager is closed
	stop context.CancelCauseFunc
	wg   sync.WaitGroup

	// mu guards what follows and the waiters of jobs. It is never held over I/O.
	mu        sync.Mutex
	closed    bool
	templates map[string]*template       // ready ones, by ID
	building  map[string]*build          // by ID
	names     map[string]string          // alias -> ID
	keys      map[string]Key             // of ready templates
	users     map[string]map[string]bool // template ID -> users
	reserved  int64                      // bytes of the pool that builds under way may fill
}

// template is one that is ready.
type template struct {
	manifest manifest
	dirs     dirs
	sizes    map[string]sizeManifest // by sizeName
	flights  map[string]*job         // sizes that are being made
}

// build is one that is being made.
type build struct {
	*job
	spec   cube.TemplateSpec
	digest string
	since  time.Time
}

// New opens the templates below cfg.Dir. It removes what a crash left of builds and
// deletions, and completes the records of templates that were just finished.
func New(cfg Config) (*Manager, error) {
	if cfg.BootTimeout == 0 {
		cfg.BootTimeout = defaultBootTimeout
	}
	if cfg.Bounds == (Bounds{}) {
		var err error
		if cfg.Bounds, err = hostBounds(); err != nil {
			return nil, err
		}
	}
	if err := durable.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make templates directory: %w", err)
	}
	m := &Manager{
		cfg:       cfg,
		templates: map[string]*template{},
		building:  map[string]*build{},
		names:     map[string]string{},
		keys:      map[string]Key{},
		users:     map[string]map[string]bool{},
	}
	m.ctx, m.stop = context.WithCancelCause(context.Background())
	if err := m.load(m.ctx); err != nil {
		return nil, fmt.Errorf("load templates: %w", err)
	}
	return m, nil
}

func hostBounds() (Bounds, error) {
	var info syscall.Sysinfo_t
	if err := syscall.Sysinfo(&info); err != nil {
		return Bounds{}, fmt.Errorf("memory of the host: %w", err)
	}
	return Bounds{MaxVCPUs: 4 * runtime.NumCPU(), MaxMemoryMiB: int(info.Totalram * uint64(info.Unit) >> 20)}, nil
}

// Close ends the builds under way and returns when nothing is left of them.
func (m *Manager) Close() error {
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	m.stop(errClosed)
	m.wg.Wait()
	return nil
}

// Get implements cube.Templates.
func (m *Manager) Get(_ context.Context, ref string) (cube.Template, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	id, err := m.resolve(ref)
	if err != nil {
		return cube.Template{}, err
	}
	if t, ok := m.templates[id]; ok {
		return m.describe(t), nil
	}
	return m.building[id].describe(), nil
}

// List implements cube.Templates. The oldest comes first.
func (m *Manager) List(context.Context) ([]cube.Template, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := make([]cube.Template, 0, len(m.templates)+len(m.building))
	for _, t := range m.templates {
		all = append(all, m.describe(t))
	}
	for _, b := range m.building {
		all = append(all, b.describe())
	}
	slices.SortFunc(all, func(a, b cube.Template) int {
		return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), strings.Compare(a.ID, b.ID))
	})
	return all, nil
}

// Resolve returns the ID of a ready template. Codes: NotFound, Invalid (ambiguous),
// FailedPrecondition (still being built).
func (m *Manager) Resolve(_ context.Context, ref string) (string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	t, err := m.ready(ref)
	if err != nil {
		return "", err
	}
	return t.manifest.Template.ID, nil
}

// ready returns the template of the reference. It is called with mu held.
func (m *Manager) ready(ref string) (*template, error) {
	id, err := m.resolve(ref)
	if err != nil {
		return nil, err
	}
	if t, ok := m.templates[id]; ok {
		return t, nil
	}
	return nil, &cube.Error{Code: cube.CodeFailedPrecondition, Op: "use template", ID: id, Err: errors.New("it is still being built")}
}

// resolve finds an ID by itself, by a name, or by a unique beginning. It is called with
// mu held.
func (m *Manager) resolve(ref string) (string, error) {
	if m.exists(ref) {
		return ref, nil
	}
	if id, ok := m.names[ref]; ok && m.exists(id) {
		return id, nil
	}
	var found []string
	if len(ref) > len(idPrefix) && strings.HasPrefix(ref, idPrefix) {
		for id := range m.templates {
			if strings.HasPrefix(id, ref) {
				found = append(found, id)
			}
		}
		for id := range m.building {
			if strings.HasPrefix(id, ref) {
				found = append(found, id)
			}
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return "", &cube.Error{Code: cube.CodeNotFound, Op: "find template", ID: ref, Err: fmt.Errorf("no template has the ID or name %q", ref)}
	}
	slices.Sort(found)
	return "", &cube.Error{Code: cube.CodeInvalid, Op: "find template", ID: ref, Err: fmt.Errorf("%q is the beginning of %s", ref, strings.Join(found, " and "))}
}

func (m *Manager) exists(id string) bool {
	return m.templates[id] != nil || m.building[id] != nil
}

// describe is called with mu held.
func (m *Manager) describe(t *template) cube.Template {
	out := t.manifest.Template
	out.State = cube.TemplateReady
	out.Names, out.Sizes = nil, nil
	for name, id := range m.names {
		if id == out.ID {
			out.Names = append(out.Names, name)
		}
	}
	slices.Sort(out.Names)
	if s, ok := t.sizes[sizeName(out.Resources)]; ok {
		out.Machine = s.Machine
	}
	for _, s := range t.sizes {
		out.Sizes = append(out.Sizes, s.Resources)
	}
	slices.SortFunc(out.Sizes, func(a, b cube.Resources) int {
		return cmp.Or(a.VCPUs-b.VCPUs, a.MemoryMiB-b.MemoryMiB)
	})
	return out
}

func (b *build) describe() cube.Template {
	return cube.Template{
		ID: b.spec.ID, State: cube.TemplateBuilding, Image: cmp.Or(b.spec.Image, b.spec.ArchivePath),
		Resources: b.spec.Resources, DiskMiB: b.spec.DiskMiB, StartCommand: b.spec.StartCommand,
		Ready: b.spec.Ready, CreatedAt: b.since,
	}
}
