package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/cubesandbox/cubelet/internal/agent/wire"
)

// maxInit bounds the body of /init, in bytes.
const maxInit = 4 << 20

// initRequest is the body of /init: E2B's fields, and ours below "cube".
type initRequest struct {
	EnvVars        map[string]string `json:"envVars"`
	AccessToken    string            `json:"accessToken"`
	Timestamp      *time.Time        `json:"timestamp"`
	DefaultUser    string            `json:"defaultUser"`
	DefaultWorkdir string            `json:"defaultWorkdir"`
	Cube           *cubeInit         `json:"cube"`
}

type cubeInit struct {
	SandboxID   string   `json:"sandboxID"`
	TemplateID  string   `json:"templateID"`
	Hostname    string   `json:"hostname"`
	MachineID   string   `json:"machineID"`
	Entropy     []byte   `json:"entropy"`
	Address     string   `json:"address"`
	Gateway     string   `json:"gateway"`
	Nameservers []string `json:"nameservers"`
	Entrypoint  []string `json:"entrypoint"`
	Cmd         []string `json:"cmd"`
}

// handleInit tells the agent which sandbox it is. It may be repeated by whoever knows the
// access token; before a token is set, by anyone.
func (s *Server) handleInit(w http.ResponseWriter, r *http.Request) {
	if !allow(w, r, http.MethodPost) {
		return
	}
	var in initRequest
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxInit)).Decode(&in); err != nil {
		writeError(w, http.StatusBadRequest, fmt.Sprintf("invalid body: %v", err))
		return
	}
	msg := in.message()
	msg.PresentedToken = r.Header.Get(tokenHeader)
	if err := s.init(&msg); err != nil {
		status := http.StatusInternalServerError
		if he := (*hostError)(nil); errors.As(err, &he) && he.code == wire.CodeToken {
			status = http.StatusUnauthorized
		}
		writeError(w, status, err.Error())
		return
	}
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusNoContent)
}

func (in *initRequest) message() wire.Init {
	m := wire.Init{Token: in.AccessToken, Env: in.EnvVars, User: in.DefaultUser, Workdir: in.DefaultWorkdir}
	if in.Timestamp != nil {
		m.UnixNano = in.Timestamp.UnixNano()
	}
	if c := in.Cube; c != nil {
		m.SandboxID, m.TemplateID, m.Hostname, m.MachineID = c.SandboxID, c.TemplateID, c.Hostname, c.MachineID
		m.Entropy, m.Address, m.Gateway, m.Nameservers = c.Entropy, c.Address, c.Gateway, c.Nameservers
		m.Entrypoint, m.Cmd = c.Entrypoint, c.Cmd
	}
	return m
}

// init applies in when the token it presents, or the one it sets, is the current one.
// What in leaves empty stays as it is.
func (s *Server) init(in *wire.Init) error {
	s.initMu.Lock()
	defer s.initMu.Unlock()
	old := s.identity()
	if !old.accepts(in.PresentedToken) && !old.accepts(in.Token) {
		return errToken()
	}
	id := *old
	if in.Token != "" {
		id.token = in.Token
	}
	if in.User != "" {
		id.user = in.User
	}
	if in.Workdir != "" {
		id.workdir = in.Workdir
	}
	if in.Env != nil || in.SandboxID != "" {
		id.env = sandboxEnv(old.env, in)
	}
	if len(in.Entrypoint)+len(in.Cmd) > 0 {
		id.entry, id.cmd = in.Entrypoint, in.Cmd
	}
	if err := s.applyMachine(&id, in); err != nil {
		return err
	}
	s.id.Store(&id)
	_, _ = s.user("") // the files of the image are read here, not in the first start
	return nil
}

// E2B's variables, set for every process of a sandbox.
const (
	envSandbox    = "E2B_SANDBOX"
	envSandboxID  = "E2B_SANDBOX_ID"
	envTemplateID = "E2B_TEMPLATE_ID"
)

// sandboxEnv returns the variables of in, and E2B's.
func sandboxEnv(old map[string]string, in *wire.Init) map[string]string {
	env := make(map[string]string, len(in.Env)+3)
	env[envSandbox] = "true"
	for k, v := range map[string]string{envSandboxID: in.SandboxID, envTemplateID: in.TemplateID} {
		if v == "" {
			v = old[k]
		}
		if v != "" {
			env[k] = v
		}
	}
	for k, v := range in.Env {
		env[k] = v
	}
	return env
}

// applyMachine makes the machine the sandbox's own. The clock comes first, because the
// files that follow carry times; a time older than the last one is a late repeat.
func (s *Server) applyMachine(id *identity, in *wire.Init) error {
	m := s.cfg.Machine
	setTime := in.UnixNano > id.at
	if setTime {
		id.at = in.UnixNano
	}
	if m == nil {
		return nil
	}
	var errs []error
	step := func(name string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("set %s: %w", name, err))
		}
	}
	if setTime {
		step("clock", m.SetTime(time.Unix(0, in.UnixNano)))
	}
	if len(in.Entropy) > 0 {
		step("entropy", m.AddEntropy(in.Entropy))
	}
	if in.Workdir != "" {
		// As container engines do: a working directory that the image names exists.
		u, err := s.accountOf(id.user)
		if err == nil {
			err = m.MakeDir(in.Workdir, int(u.uid), int(u.gid))
		}
		step("working directory", err)
	}
	if in.Address != "" {
		step("address", m.SetAddress(in.Address, in.Gateway))
	}
	if in.Hostname != "" {
		step("hostname", m.SetHostname(in.Hostname))
	}
	if in.MachineID != "" {
		step("machine id", m.SetMachineID(in.MachineID))
	}
	if len(in.Nameservers) > 0 {
		step("nameservers", m.SetNameservers(in.Nameservers))
	}
	return errors.Join(errs...)
}

// envs answers with the sandbox's variables.
func (s *Server) envs(w http.ResponseWriter, r *http.Request) {
	if !allow(w, r, http.MethodGet) {
		return
	}
	env := s.identity().env
	if env == nil {
		env = map[string]string{}
	}
	w.Header().Set("Cache-Control", "no-store")
	writeJSON(w, http.StatusOK, env)
}
