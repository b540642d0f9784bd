package agent

import (
	"encoding/json"
	"errors"
	"net/http"
	"syscall"
)

// maxSignal is the highest signal of Linux.
const maxSignal = 64

// signal sends any signal to a process. E2B's SendSignal knows two only.
func (s *Server) signal(w http.ResponseWriter, r *http.Request) {
	if !allow(w, r, http.MethodPost) {
		return
	}
	var in struct {
		PID    int `json:"pid"`
		Signal int `json:"signal"`
	}
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 4<<10)).Decode(&in); err != nil {
		writeError(w, http.StatusBadRequest, "invalid body: "+err.Error())
		return
	}
	if in.Signal < 1 || in.Signal > maxSignal {
		writeError(w, http.StatusBadRequest, "a signal is a number from 1 to 64")
		return
	}
	p := s.procs.find(func(p *process) bool { return p.pid == in.PID })
	if p == nil {
		writeError(w, http.StatusNotFound, "process not found")
		return
	}
	switch err := p.signal(syscall.Signal(in.Signal)); {
	case errors.Is(err, syscall.ESRCH):
		writeError(w, http.StatusNotFound, "process has ended")
	case err != nil:
		writeError(w, http.StatusInternalServerError, err.Error())
	default:
		w.WriteHeader(http.StatusNoContent)
	}
}

// shutdown powers the machine off. The answer goes out first.
func (s *Server) shutdown(w http.ResponseWriter, r *http.Request) {
	if !allow(w, r, http.MethodPost) {
		return
	}
	if s.cfg.Machine == nil {
		writeError(w, http.StatusNotImplemented, "the agent does not run a machine")
		return
	}
	w.Header().Set("Connection", "close")
	w.WriteHeader(http.StatusNoContent)
	_ = http.NewResponseController(w).Flush()
	go func() {
		if err := s.cfg.Machine.PowerOff(); err != nil {
			s.log.Error("power off", "err", err)
		}
	}()
}
