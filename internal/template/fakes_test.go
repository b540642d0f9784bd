package template_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/guestapi"
	"github.com/cubesandbox/cubelet/internal/hosttest"
	"github.com/cubesandbox/cubelet/internal/template"
	"github.com/cubesandbox/cubelet/internal/testenv"
	"github.com/cubesandbox/cubelet/internal/tplimage"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// host is a fake of everything that a Manager needs. It outlives Managers.
type host struct {
	*hosttest.World
	t    *testing.T
	dir  string
	book *book

	mu       sync.Mutex
	faults   map[string]fault
	calls    map[string]int
	machines map[string]vmm.Machine // by owner, as launched
	inits    []guestapi.Init
	ready    func() int // exit code of every command that is run to its end
	commands *session   // of the start command
	open     map[int]bool
}

// fault breaks one operation: it blocks until its context ends, or fails.
type fault struct {
	err     error
	block   bool
	reached chan struct{}
}

func newHost(t *testing.T) *host {
	t.Helper()
	before := goleak.IgnoreCurrent()
	t.Cleanup(func() { goleak.VerifyNone(t, before) })
	h := &host{
		World: hosttest.NewWorld(), t: t, dir: filepath.Join(t.TempDir(), "templates"),
		book:   newBook(),
		faults: map[string]fault{}, calls: map[string]int{}, machines: map[string]vmm.Machine{},
		ready: func() int { return 0 }, open: map[int]bool{},
	}
	h.book.do = h.do
	return h
}

func (h *host) config() template.Config {
	return template.Config{
		Dir: h.dir, Images: images{h}, VMMs: vmms{hosttest.VMMs{W: h.World}, h}, Network: network{hosttest.Network{W: h.World}, h},
		Disks: disks{h}, Guest: fakeGuest{h}, Records: h.book,
		Machine: cube.MachineInfo{QEMU: "10.0.2", Kernel: "6.1"},
		Kernel:  "/kernel", Initrd: "/initrd", Cmdline: "quiet",
		Limits: func(r cube.Resources) vmm.Limits { return vmm.Limits{MemoryBytes: int64(r.MemoryMiB) << 20} },
		Bounds: template.Bounds{MaxVCPUs: 8, MaxMemoryMiB: 4096},
		Log:    slog.New(slog.DiscardHandler),
	}
}

// manager opens the host's templates.
func (h *host) manager(change ...func(*template.Config)) *template.Manager {
	h.t.Helper()
	c := h.config()
	for _, f := range change {
		f(&c)
	}
	m, err := template.New(c)
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { m.Close() })
	return m
}

func (h *host) breakOp(op string, f fault) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.faults[op] = f
}

func (h *host) mend() {
	h.mu.Lock()
	defer h.mu.Unlock()
	clear(h.faults)
	for _, op := range hosttest.Ops() {
		h.Break(op, hosttest.Fault{})
	}
}

func (h *host) count(op string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.calls[op]
}

func (h *host) do(ctx context.Context, op string) error {
	h.mu.Lock()
	f := h.faults[op]
	h.calls[op]++
	h.mu.Unlock()
	if f.reached != nil {
		close(f.reached)
	}
	if f.block {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	return f.err
}

// empty reports what is left on the host: nothing after a failure.
func (h *host) empty() {
	h.t.Helper()
	if left := h.String(); left != "" {
		h.t.Errorf("left on the host:\n%s", left)
	}
	entries, err := os.ReadDir(h.dir)
	if err != nil || len(entries) > 0 {
		h.t.Errorf("left in the templates directory: %v, %v", entries, err)
	}
	if left := h.book.String(); left != "" {
		h.t.Errorf("left in the records: %s", left)
	}
}

type images struct{ h *host }

func (f images) Build(ctx context.Context, src tplimage.Source, path string, progress func(string, int64, int64)) (tplimage.Root, error) {
	for i := range int64(11) {
		progress("unpack", i*100, 1000)
	}
	if err := f.h.do(ctx, "image"); err != nil {
		return tplimage.Root{}, err
	}
	config := cube.ImageConfig{Env: []string{"PATH=/bin", "FROM=image"}, User: "app", WorkingDir: "/srv", Cmd: []string{"serve"}}
	return tplimage.Root{Ref: src.Image, Digest: "sha256:abc", Config: config, Bytes: 5}, os.WriteFile(path, []byte("erofs"), 0o600)
}

type disks struct{ h *host }

func (f disks) Clone(ctx context.Context, src, dst string) error {
	if err := f.h.do(ctx, "clone-layer"); err != nil {
		return err
	}
	info, err := os.Stat(src)
	if err != nil {
		return err
	}
	return errors.Join(os.WriteFile(dst, nil, 0o600), os.Truncate(dst, info.Size()))
}

type vmms struct {
	hosttest.VMMs
	h *host
}

func (f vmms) Launch(ctx context.Context, owner string, m vmm.Machine, tap *os.File) (vmm.Instance, error) {
	if err := os.WriteFile(m.ConsolePath, []byte("booting\r\n\x1b[1mlast words\n"), 0o600); err != nil {
		return vmm.Instance{}, err
	}
	mem, err := os.OpenFile(m.MemoryPath, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return vmm.Instance{}, err
	}
	if err := errors.Join(mem.Truncate(int64(m.MemoryMiB)<<20), mem.Close()); err != nil {
		return vmm.Instance{}, err
	}
	f.h.mu.Lock()
	f.h.machines[owner] = m
	f.h.mu.Unlock()
	return f.VMMs.Launch(ctx, owner, m, tap)
}

func (f vmms) Save(ctx context.Context, owner, statePath string) error {
	if err := f.h.do(ctx, "save"); err != nil {
		return err
	}
	return os.WriteFile(statePath, []byte("device state of "+owner), 0o600)
}

type network struct {
	hosttest.Network
	h *host
}

func (f network) Dial(_ context.Context, _ string, port int) (net.Conn, error) {
	f.h.mu.Lock()
	defer f.h.mu.Unlock()
	if !f.h.open[port] {
		return nil, errors.New("connection refused")
	}
	a, b := net.Pipe()
	b.Close()
	return a, nil
}

type fakeGuest struct{ h *host }

func (f fakeGuest) Init(ctx context.Context, _ guestapi.Dialer, in guestapi.Init) error {
	f.h.mu.Lock()
	f.h.inits = append(f.h.inits, in)
	f.h.mu.Unlock()
	return f.h.do(ctx, "init-guest")
}

func (f fakeGuest) Exec(ctx context.Context, _ guestapi.Dialer, _ string, spec cube.ExecSpec) (cube.ExecSession, error) {
	if err := f.h.do(ctx, "exec"); err != nil {
		return nil, err
	}
	f.h.mu.Lock()
	defer f.h.mu.Unlock()
	if f.h.commands == nil {
		f.h.commands = newSession()
	}
	f.h.commands.spec = spec
	return f.h.commands, nil
}

func (f fakeGuest) Run(ctx context.Context, _ guestapi.Dialer, _ string, spec cube.ExecSpec) ([]byte, []byte, int, error) {
	op := "run"
	if spec.Args[0] == "sync" {
		op = "sync"
	}
	if err := f.h.do(ctx, op); err != nil {
		return nil, nil, 0, err
	}
	if op == "sync" {
		return nil, nil, 0, nil
	}
	f.h.mu.Lock()
	defer f.h.mu.Unlock()
	return []byte("probing\n"), nil, f.h.ready(), nil
}

// session is a start command: its events are sent by the test.
type session struct {
	spec   cube.ExecSpec
	events chan cube.ExecEvent
	closed chan struct{}
	once   sync.Once
}

func newSession(events ...cube.ExecEvent) *session {
	s := &session{events: make(chan cube.ExecEvent, 10), closed: make(chan struct{})}
	for _, e := range events {
		s.events <- e
	}
	return s
}

func (s *session) Recv() (cube.ExecEvent, error) {
	select {
	case e := <-s.events:
		return e, nil
	case <-s.closed:
		return cube.ExecEvent{}, io.ErrClosedPipe
	}
}
func (s *session) SendStdin([]byte) error       { return nil }
func (s *session) CloseStdin() error            { return nil }
func (s *session) Signal(int) error             { return nil }
func (s *session) Resize(cube.WindowSize) error { return nil }
func (s *session) Close() error                 { s.once.Do(func() { close(s.closed) }); return nil }

// book is the fake of the records.
type book struct {
	do    func(ctx context.Context, op string) error
	mu    sync.Mutex
	known map[string]bool
	names map[string]string
	keys  map[string]template.Key
}

func newBook() *book {
	return &book{
		do:    func(context.Context, string) error { return nil },
		known: map[string]bool{}, names: map[string]string{}, keys: map[string]template.Key{},
	}
}

func (b *book) Load(context.Context) (template.Book, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return template.Book{Known: maps.Clone(b.known), Names: maps.Clone(b.names), Keys: maps.Clone(b.keys)}, nil
}

func (b *book) Commit(ctx context.Context, e template.Entry) error {
	if err := b.do(ctx, "commit"); err != nil {
		return err
	}
	b.mu.Lock()
	b.known[e.ID] = true
	if e.Name != "" {
		b.names[e.Name] = e.ID
	}
	if e.Key != "" {
		b.keys[e.Key] = template.Key{Digest: e.KeyDigest, TemplateID: e.ID}
	}
	b.mu.Unlock()
	return b.do(ctx, "after-commit")
}

func (b *book) Forget(_ context.Context, id string, names, keys []string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.known, id)
	for _, n := range names {
		delete(b.names, n)
	}
	for _, k := range keys {
		delete(b.keys, k)
	}
	return nil
}

func (b *book) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return strings.Join(slices.Concat(slices.Sorted(maps.Keys(b.known)), slices.Sorted(maps.Keys(b.names)), slices.Sorted(maps.Keys(b.keys))), " ")
}

// small is a request that builds fast.
func small() cube.TemplateSpec {
	return cube.TemplateSpec{Image: "registry.test/app", DiskMiB: 64, Resources: cube.Resources{VCPUs: 1, MemoryMiB: 128}}
}

func create(t *testing.T, m *template.Manager, change ...func(*cube.TemplateSpec)) cube.Template {
	t.Helper()
	spec := small()
	for _, f := range change {
		f(&spec)
	}
	tpl, err := m.Create(context.Background(), spec, nil)
	if err != nil {
		t.Fatal(err)
	}
	return tpl
}

func named(name string) func(*cube.TemplateSpec) {
	return func(s *cube.TemplateSpec) { s.Name = name }
}

func wantCode(t *testing.T, err error, code cube.Code) {
	t.Helper()
	if err == nil || cube.CodeOf(err) != code {
		t.Errorf("got %v (%s), want %s", err, cube.CodeOf(err), code)
	}
}

func await(t *testing.T, reached chan struct{}) {
	t.Helper()
	testenv.Eventually(t, 10*time.Second, func() error {
		select {
		case <-reached:
			return nil
		default:
			return errors.New("not reached")
		}
	})
}
