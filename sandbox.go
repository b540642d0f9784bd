package cube

import (
	"context"
	"io"
	"net"
	"time"
)

// Resources is the size of a virtual machine. Zero means "the template's".
type Resources struct {
	VCPUs     int `json:"vcpus"`
	MemoryMiB int `json:"memoryMiB"`
}

// SandboxSpec is a request for one sandbox.
type SandboxSpec struct {
	// TemplateRef is a template's ID, name, or unique ID prefix. Exactly one of
	// TemplateRef and SnapshotRef is set.
	TemplateRef string `json:"templateRef,omitempty"`
	// SnapshotRef is a snapshot's ID, name, or unique ID prefix: the sandbox goes on where
	// the snapshot was taken, under an identity of its own. Resources must be zero then.
	SnapshotRef string            `json:"snapshotRef,omitempty"`
	Resources   Resources         `json:"resources"`
	Env         map[string]string `json:"env,omitempty"`
	// Metadata is opaque to Cubelet and can be filtered on.
	Metadata map[string]string `json:"metadata,omitempty"`
	// Timeout is the sandbox's time to live, counted from the moment that it runs.
	// Zero means that it lives until it is deleted.
	Timeout time.Duration `json:"timeout,omitempty"`
	// OnTimeout is what happens when the time to live ends. Empty: OnTimeoutDelete.
	OnTimeout  OnTimeout     `json:"onTimeout,omitempty"`
	Volumes    []VolumeMount `json:"volumes,omitempty"`
	Network    NetworkSpec   `json:"network"`
	HostMounts []HostMount   `json:"hostMounts,omitempty"`
	// IdempotencyKey makes retries safe: the same key and the same request join or
	// return the first result, the same key and another request is AlreadyExists.
	IdempotencyKey string `json:"idempotencyKey,omitempty"`
}

// OnTimeout is what happens to a sandbox whose time to live ends.
type OnTimeout string

// The choices of OnTimeout.
const (
	OnTimeoutDelete OnTimeout = "delete"
	OnTimeoutPause  OnTimeout = "pause" // as PauseFull; no time to live runs while paused
)

// Sandbox is what is known of one sandbox.
type Sandbox struct {
	ID         string `json:"id"`
	Phase      Phase  `json:"phase"`
	Reason     string `json:"reason,omitempty"` // why it is failed, empty otherwise
	TemplateID string `json:"templateId"`
	// SnapshotID is the snapshot that the sandbox was made from or last rolled back to.
	SnapshotID string            `json:"snapshotId,omitempty"`
	Resources  Resources         `json:"resources"`
	Metadata   map[string]string `json:"metadata,omitempty"`
	Network    NetworkSpec       `json:"network"`
	CreatedAt  time.Time         `json:"createdAt"`
	// ExpiresAt is zero when the sandbox has no time to live.
	ExpiresAt time.Time     `json:"expiresAt,omitzero"`
	OnTimeout OnTimeout     `json:"onTimeout,omitempty"`
	Volumes   []VolumeMount `json:"volumes,omitempty"`
	// Paused tells how it was paused; empty unless it is.
	Paused PauseMode `json:"paused,omitempty"`
	// GuestAddress is the guest's own address with its prefix length, the same in
	// every sandbox unless NetworkSpec asks for a subnet.
	GuestAddress string `json:"guestAddress,omitempty"`
	// PID is the VMM's process ID on the host, zero when none runs.
	PID int `json:"pid,omitempty"`
	// Timings are the stages of the create, in the order in which they started.
	Timings []StageTiming `json:"timings,omitempty"`
}

// StageTiming tells how long one stage took.
type StageTiming struct {
	Stage    string        `json:"stage"`
	Start    time.Duration `json:"start"` // since the call began
	Duration time.Duration `json:"duration"`
}

// ListFilter selects sandboxes. Empty fields select all.
type ListFilter struct {
	Phases      []Phase
	TemplateRef string
	Metadata    map[string]string // every pair must match
	PageSize    int               // 0 = 100, at most 1000
	PageToken   string            // from the page before
}

// SandboxPage is one page of a list, oldest first.
type SandboxPage struct {
	Sandboxes     []Sandbox
	NextPageToken string // empty on the last page
	Total         int    // how many match the filter in all
}

// LogOptions selects a part of a sandbox's console log.
type LogOptions struct {
	TailLines int  // 0 = all that is kept
	Follow    bool // wait for more until the context ends or the sandbox is gone
}

// Sandboxes is the inbound interface of the engine (internal/sandbox). A ref is an
// ID or a unique prefix of one; an ambiguous prefix is CodeInvalid, an unknown one
// CodeNotFound.
type Sandboxes interface {
	// Create makes a sandbox and returns when its guest agent has answered.
	// Codes: Invalid, NotFound (template), AlreadyExists (idempotency key),
	// ResourceExhausted, NoSpace, Unimplemented, DeadlineExceeded, Canceled, Internal.
	Create(ctx context.Context, spec SandboxSpec) (Sandbox, error)
	Get(ctx context.Context, ref string) (Sandbox, error)
	List(ctx context.Context, f ListFilter) (SandboxPage, error)
	// Delete returns when nothing of the sandbox is left on the host.
	Delete(ctx context.Context, ref string) error
	// Exec starts a program in the guest. The caller closes the session.
	Exec(ctx context.Context, ref string, spec ExecSpec) (ExecSession, error)
	// Logs copies the console log to w.
	Logs(ctx context.Context, ref string, o LogOptions, w io.Writer) error
	// DialGuest opens a TCP connection to a port of the guest; for AgentPort it also
	// returns the access token. The caller closes the connection.
	DialGuest(ctx context.Context, ref string, port int) (conn net.Conn, token string, err error)
}
