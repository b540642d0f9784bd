// Package guestapi holds the data of conversations with a guest agent: plain data that
// the engine, internal/template and internal/guest may import.
package guestapi

import (
	"context"
	"net"
	"time"
)

// Init is what the agent is told after every boot and restore. Two sandboxes never
// share Entropy, MachineID, Hostname or AccessToken.
type Init struct {
	SandboxID   string
	TemplateID  string
	Hostname    string
	MachineID   string // 32 hexadecimal digits
	AccessToken string
	// PresentedToken is the token that the agent expects, when it is not AccessToken: of
	// the sandbox that a snapshot was taken of.
	PresentedToken string
	Entropy        []byte // at least 32 bytes from the host's random source
	Time           time.Time
	Env            map[string]string
	User           string // default user
	Workdir        string
	// Address and Gateway are set when the guest's subnet is not the template's.
	Address, Gateway string
	Nameservers      []string
	Entrypoint, Cmd  []string
}

// Dialer opens a connection to a port of one guest.
type Dialer func(ctx context.Context, port int) (net.Conn, error)
