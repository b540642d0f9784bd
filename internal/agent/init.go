package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"
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
	status, err := s.init(in, r.Header.Get(tokenHeader))
	if err != nil {
		writeError(w, status, err.Error())
		return
	}
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusNoContent)
}

// init applies in when token, or the token in it, is the current one.
func (s *Server) init(in initRequest, token string) (int, error) {
	s.initMu.Lock()
	defer s.initMu.Unlock()
	old := s.identity()
	if !old.accepts(token) && !old.accepts(in.AccessToken) {
		return http.StatusUnauthorized, errors.New("the access token is not the sandbox's")
	}
	id := *old
	if in.AccessToken != "" {
		id.token = in.AccessToken
	}
	if in.DefaultUser != "" {
		id.user = in.DefaultUser
	}
	if in.DefaultWorkdir != "" {
		id.workdir = in.DefaultWorkdir
	}
	cube := in.Cube
	if cube == nil {
		cube = &cubeInit{}
	}
	if in.EnvVars != nil || in.Cube != nil {
		id.env = sandboxEnv(old.env, in.EnvVars, cube)
	}
	if in.Cube != nil {
		id.entry, id.cmd = cube.Entrypoint, cube.Cmd
	}
	if err := s.applyMachine(&id, in.Timestamp, cube); err != nil {
		return http.StatusInternalServerError, err
	}
	s.id.Store(&id)
	return http.StatusNoContent, nil
}

// E2B's variables, set for every process of a sandbox.
const (
	envSandbox    = "E2B_SANDBOX"
	envSandboxID  = "E2B_SANDBOX_ID"
	envTemplateID = "E2B_TEMPLATE_ID"
)

// sandboxEnv returns the sandbox's variables: vars, and E2B's from cube, else from old.
func sandboxEnv(old, vars map[string]string, cube *cubeInit) map[string]string {
	env := make(map[string]string, len(vars)+3)
	for k, v := range vars {
		env[k] = v
	}
	env[envSandbox] = "true"
	for k, v := range map[string]string{envSandboxID: cube.SandboxID, envTemplateID: cube.TemplateID} {
		if v == "" {
			v = old[k]
		}
		if _, ok := vars[k]; !ok && v != "" {
			env[k] = v
		}
	}
	return env
}

// applyMachine makes the machine the sandbox's own. The clock comes first, because the
// files that follow carry times; a timestamp older than the last one is a late repeat.
func (s *Server) applyMachine(id *identity, at *time.Time, c *cubeInit) error {
	m := s.cfg.Machine
	setTime := at != nil && at.After(id.at)
	if setTime {
		id.at = *at
	}
	if m == nil {
		return nil
	}
	var errs []error
	step := func(name string, wanted bool, do func() error) {
		if !wanted {
			return
		}
		if err := do(); err != nil {
			errs = append(errs, fmt.Errorf("set %s: %w", name, err))
		}
	}
	step("clock", setTime, func() error { return m.SetTime(*at) })
	step("entropy", len(c.Entropy) > 0, func() error { return m.AddEntropy(c.Entropy) })
	step("address", c.Address != "", func() error { return m.SetAddress(c.Address, c.Gateway) })
	step("hostname", c.Hostname != "", func() error { return m.SetHostname(c.Hostname) })
	step("machine id", c.MachineID != "", func() error { return m.SetMachineID(c.MachineID) })
	step("nameservers", len(c.Nameservers) > 0, func() error { return m.SetNameservers(c.Nameservers) })
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
