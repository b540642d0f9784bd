package agent

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"net/http"
)

// identity is what /init told the agent. It is never changed, only replaced.
type identity struct {
	token   string
	user    string // default user; empty: root
	workdir string
	env     map[string]string // the sandbox's variables and E2B's
	entry   []string
	cmd     []string
	at      int64 // of the last /init that set the clock, in Unix nanoseconds
}

func (s *Server) identity() *identity { return s.id.Load() }

func (id *identity) imageArgs() []string {
	return append(append([]string(nil), id.entry...), id.cmd...)
}

// accepts reports whether token opens the agent; anything does before a token is set.
func (id *identity) accepts(token string) bool {
	if id.token == "" {
		return true
	}
	a, b := sha256.Sum256([]byte(token)), sha256.Sum256([]byte(id.token))
	return subtle.ConstantTimeCompare(a[:], b[:]) == 1
}

// user resolves a name; the empty one is the default user.
func (s *Server) user(name string) (*user, error) {
	if name == "" {
		name = s.identity().user
	}
	return s.accountOf(name)
}

// accountOf resolves a name; the empty one is root.
func (s *Server) accountOf(name string) (*user, error) {
	if name == "" {
		name = "root"
	}
	return s.accounts.lookup(name)
}

// tokenHeader carries the access token.
const tokenHeader = "X-Access-Token"

// authorised lets through what carries the access token, and the paths that check
// for themselves.
func (s *Server) authorised(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !public(r) && !s.identity().accepts(r.Header.Get(tokenHeader)) {
			writeError(w, http.StatusUnauthorized, "unauthorized access, please provide a valid access token or method signing if supported")
			return
		}
		next.ServeHTTP(w, r)
	})
}

func public(r *http.Request) bool {
	switch r.URL.Path {
	case "/health":
		return r.Method == http.MethodGet || r.Method == http.MethodHead
	case "/files":
		return r.Method == http.MethodGet || r.Method == http.MethodHead || r.Method == http.MethodPost
	case "/init":
		return true
	}
	return false
}

// writeError answers with E2B's error body.
func writeError(w http.ResponseWriter, status int, message string) {
	writeJSON(w, status, struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}{status, message})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(b)
}
