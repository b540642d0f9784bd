// Package containerd runs containerd inside the daemon's process, with its own root,
// state, sockets and shim, so that no other containerd on the host is touched or
// needed. VM processes are children of shims, not of the daemon: they outlive it.
package containerd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/cmd/containerd/server"
	srvconfig "github.com/containerd/containerd/v2/cmd/containerd/server/config"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/version"
	"github.com/prometheus/client_golang/prometheus"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

const (
	shimName = "containerd-shim-runc-v2"
	// maxSocketDir is containerd's bound: a shim's socket is named by 64 characters.
	maxSocketDir = 42
)

// Config says where the embedded containerd keeps its things. All paths are absolute.
type Config struct {
	Root          string // survives a reboot: content, snapshots, metadata
	State         string // of one boot: emptied when the host has booted since
	Address       string // of the gRPC socket
	ShimSocketDir string // at most 42 characters
	LibexecDir    string // holds containerd-shim-runc-v2 of the same version
	Log           *slog.Logger
}

// Server is a running containerd. Stop it once.
type Server struct {
	cfg    Config
	srv    *server.Server
	lock   *os.File
	cancel context.CancelFunc
	exits  []vmm.Exit
	stop   sync.Once
}

// Start runs containerd and returns when its sockets answer. It uses process-wide
// state of containerd's libraries (logrus's standard logger, Prometheus's default
// registerer, the temporary mount location), so two servers in one process must not
// be started at the same moment. Codes: Invalid, FailedPrecondition (another daemon
// holds the root, or the shim is missing).
func Start(ctx context.Context, cfg Config) (_ *Server, err error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	lock, err := lockRoot(cfg.Root)
	if err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg, lock: lock, cancel: func() {}}
	defer func() {
		if err != nil {
			s.Stop()
		}
	}()
	if err := resetStateOfEarlierBoot(cfg.State); err != nil {
		return nil, err
	}
	s.exits = readExits(cfg.State)

	redirectLog(cfg.Log)
	// containerd registers its collectors here each time and panics at the second.
	prometheus.DefaultRegisterer = prometheus.NewRegistry()
	conf := cfg.server()
	if err := server.CreateTopLevelDirectories(conf); err != nil {
		return nil, fmt.Errorf("create containerd's directories: %w", err)
	}
	if err := cleanTempMounts(cfg.Root, cfg.Log); err != nil {
		return nil, err
	}
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s.cancel = cancel
	if s.srv, err = server.New(run, conf); err != nil {
		return nil, fmt.Errorf("initialise containerd: %w", err)
	}
	if err := s.srv.Start(run); err != nil {
		return nil, fmt.Errorf("start containerd: %w", err)
	}
	s.srv.Wait()
	return s, nil
}

// Stop ends the server. Tasks go on; a later Start finds them.
func (s *Server) Stop() {
	s.stop.Do(func() {
		s.cancel()
		if s.srv != nil {
			s.srv.Stop()
		}
		s.lock.Close() // and with it the lock
	})
}

// Client returns a client whose calls use the namespace and whose containers use
// the shim from the libexec directory. The caller closes it.
func (s *Server) Client(namespace string) (*client.Client, error) {
	c, err := client.New(s.cfg.Address,
		client.WithDefaultNamespace(namespace),
		client.WithDefaultRuntime(s.cfg.shim()))
	if err != nil {
		return nil, fmt.Errorf("connect to containerd: %w", err)
	}
	return c, nil
}

// LostExits returns how tasks ended that died while no daemon watched. containerd
// itself forgets these when it starts. Owner is the name of the container.
func (s *Server) LostExits() []vmm.Exit { return s.exits }

// Connect returns a client of an external containerd, which then needs a shim of
// its own version. The caller closes it. Code Unavailable when nothing answers.
func Connect(ctx context.Context, address, namespace string) (*client.Client, error) {
	if !filepath.IsAbs(address) {
		return nil, cube.InvalidField("containerd-address", "%q is not an absolute path", address)
	}
	c, err := client.New(address, client.WithDefaultNamespace(namespace))
	if err != nil {
		return nil, cube.Errorf(cube.CodeUnavailable, "connect to containerd at %s: %w", address, err)
	}
	if _, err := c.Version(ctx); err != nil {
		return nil, errors.Join(cube.Errorf(cube.CodeUnavailable, "containerd at %s: %w", address, err), c.Close())
	}
	return c, nil
}

func (c Config) shim() string { return filepath.Join(c.LibexecDir, shimName) }

func (c Config) check() error {
	for field, path := range map[string]string{
		"root": c.Root, "state": c.State, "address": c.Address, "shimSocketDir": c.ShimSocketDir, "libexecDir": c.LibexecDir,
	} {
		if !filepath.IsAbs(path) {
			return cube.InvalidField("containerd."+field, "%q is not an absolute path", path)
		}
	}
	if len(c.ShimSocketDir) > maxSocketDir {
		return cube.InvalidField("containerd.shimSocketDir", "%q is longer than %d characters", c.ShimSocketDir, maxSocketDir)
	}
	info, err := os.Stat(c.shim())
	if err != nil || info.Mode()&0o111 == 0 || !info.Mode().IsRegular() {
		e := cube.Errorf(cube.CodeFailedPrecondition, "%s is not an executable file", c.shim())
		return e.WithHint("install %s into %s: it is built together with cubelet", shimName, c.LibexecDir)
	}
	return nil
}

func (c Config) server() *srvconfig.Config {
	return &srvconfig.Config{
		Version: version.ConfigVersion,
		Root:    c.Root,
		State:   c.State,
		Plugins: map[string]any{
			"io.containerd.server.v1.grpc":          map[string]any{"address": c.Address},
			"io.containerd.server.v1.ttrpc":         map[string]any{"address": c.Address + ".ttrpc"},
			"io.containerd.shim.v1.manager":         map[string]any{"socket_dir": c.ShimSocketDir},
			"io.containerd.monitor.task.v1.cgroups": map[string]any{"no_prometheus": true},
		},
		// Without these nothing works: better no start than half a one.
		RequiredPlugins: []string{
			"io.containerd.snapshotter.v1.overlayfs", "io.containerd.metadata.v1.bolt",
			"io.containerd.runtime.v2.task", "io.containerd.grpc.v1.tasks",
		},
	}
}

func cleanTempMounts(root string, log *slog.Logger) error {
	if err := mount.SetTempMountLocation(filepath.Join(root, "tmpmounts")); err != nil {
		return fmt.Errorf("set temporary mount location: %w", err)
	}
	warnings, err := mount.CleanupTempMounts(0)
	if err != nil {
		return fmt.Errorf("unmount temporary mounts: %w", err)
	}
	for _, w := range warnings {
		log.Warn("unmount temporary mount", "error", w)
	}
	return nil
}
