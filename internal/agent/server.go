package agent

import (
	"log/slog"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/cubesandbox/cubelet/api/envd/filesystem/filesystemconnect"
	"github.com/cubesandbox/cubelet/api/envd/process/processconnect"
)

// Machine is what /init and /shutdown do to the machine that the agent runs on.
type Machine interface {
	SetTime(t time.Time) error
	// AddEntropy mixes b into the kernel's random pool and reseeds its generator.
	AddEntropy(b []byte) error
	SetHostname(name string) error
	SetMachineID(id string) error
	SetNameservers(servers []string) error
	// SetAddress gives eth0 one more address with its prefix length, and a default gateway.
	SetAddress(address, gateway string) error
	// MakeDir makes an absolute path a directory of that user when nothing is there.
	MakeDir(path string, uid, gid int) error
	// PowerOff ends the machine after its disks are clean. It does not return on success.
	PowerOff() error
}

// Config is what a server needs.
type Config struct {
	Log *slog.Logger
	// PID1 makes the server reap every child of this process.
	PID1 bool
	// Machine may be nil: then /init only keeps what it is told, and /shutdown is refused.
	Machine Machine
	// Cgroups is a directory of a cgroup v2 hierarchy in which every process gets a group
	// of its own. Empty: none.
	Cgroups string
}

// Server serves the agent's API.
type Server struct {
	cfg      Config
	log      *slog.Logger
	reaper   *reaper
	procs    procs
	accounts accounts
	cgroups  *cgroups
	devNull  int // descriptor, for programs without stdin
	cpu      cpuSampler

	initMu sync.Mutex // serialises /init
	id     atomic.Pointer[identity]
}

// New returns a server that already reaps; the caller closes it.
func New(cfg Config) (*Server, error) {
	devNull, err := syscall.Open(os.DevNull, syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: os.DevNull, Err: err}
	}
	s := &Server{cfg: cfg, log: cfg.Log, cgroups: newCgroups(cfg.Cgroups), devNull: devNull}
	s.procs.init()
	s.id.Store(&identity{})
	s.reaper = newReaper(cfg.PID1, s.cgroups.sweep)
	return s, nil
}

// Close kills every process the server started and stops reaping.
func (s *Server) Close() error {
	for _, p := range s.procs.running() {
		_ = p.kill("the agent stops")
	}
	s.reaper.close()
	s.cgroups.close()
	return syscall.Close(s.devNull)
}

// maxMessage bounds one message of a client, in bytes. Files do not travel in messages.
const maxMessage = 32 << 20

// Handler returns the API.
func (s *Server) Handler() http.Handler {
	opts := connect.WithHandlerOptions(
		connect.WithReadMaxBytes(maxMessage),
		connect.WithCompressMinBytes(1<<30), // the host is near: compressing costs more than it saves
	)
	mux := http.NewServeMux()
	mux.Handle(processconnect.NewProcessHandler(&processService{s}, opts))
	mux.Handle(filesystemconnect.NewFilesystemHandler(&filesystemService{s: s}, opts))
	mux.HandleFunc("/health", s.health)
	mux.HandleFunc("/init", s.handleInit)
	mux.HandleFunc("/files", s.files)
	mux.HandleFunc("/metrics", s.metrics)
	mux.HandleFunc("/envs", s.envs)
	mux.HandleFunc("/signal", s.signal)
	mux.HandleFunc("/shutdown", s.shutdown)
	return s.authorised(mux)
}

func (s *Server) health(w http.ResponseWriter, r *http.Request) {
	if !allow(w, r, http.MethodGet, http.MethodHead) {
		return
	}
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusNoContent)
}

// allow answers 405 when the request's method is not one of methods.
func allow(w http.ResponseWriter, r *http.Request, methods ...string) bool {
	for _, m := range methods {
		if r.Method == m {
			return true
		}
	}
	writeError(w, http.StatusMethodNotAllowed, "method not allowed")
	return false
}
