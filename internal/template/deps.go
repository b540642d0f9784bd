package template

import (
	"context"
	"net"
	"os"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/guestapi"
	"github.com/cubesandbox/cubelet/internal/tplimage"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// The interfaces that template builds need of the adapters. An owner is a build: its
// name begins with the template's ID. Destroy and Release succeed when there is nothing.

// Images makes root disks of OCI images.
type Images interface {
	// Build writes the image's files as an EROFS image to path, which must not exist;
	// after an error it does not. stage is "pull" or "unpack". Codes: Invalid, NotFound,
	// Unavailable, PermissionDenied, NoSpace.
	Build(ctx context.Context, src tplimage.Source, path string, progress func(stage string, done, total int64)) (tplimage.Root, error)
}

// VMMs runs virtual machines.
type VMMs interface {
	Claim(ctx context.Context, owner string, l vmm.Limits) (vmm.Instance, error)
	Launch(ctx context.Context, owner string, m vmm.Machine, tap *os.File) (vmm.Instance, error)
	// Save stops the machine for good and writes its device state to a new file.
	Save(ctx context.Context, owner, statePath string) error
	// Wait blocks until the owner's VMM process is gone.
	Wait(ctx context.Context, owner string) (vmm.Exit, error)
	Destroy(ctx context.Context, owner string) error
}

// Network gives each build a network namespace with a tap device in it.
type Network interface {
	Claim(ctx context.Context, owner string, spec cube.NetworkSpec) (tap *os.File, err error)
	Dial(ctx context.Context, owner string, port int) (net.Conn, error)
	Release(ctx context.Context, owner string) error
}

// Disks copies files on the pool.
type Disks interface {
	// Clone makes dst a copy-on-write copy of src.
	Clone(ctx context.Context, src, dst string) error
}

// Guest talks to guest agents.
type Guest interface {
	// Init identifies the machine to its agent. It waits for the agent to answer.
	Init(ctx context.Context, dial guestapi.Dialer, in guestapi.Init) error
	Exec(ctx context.Context, dial guestapi.Dialer, token string, spec cube.ExecSpec) (cube.ExecSession, error)
	// Run runs a program to its end.
	Run(ctx context.Context, dial guestapi.Dialer, token string, spec cube.ExecSpec) (stdout, stderr []byte, exit int, err error)
}

// Records is the durable store of what is not in a template's own directory. Every
// method returns when the data is on disk, all of it or none.
type Records interface {
	Load(ctx context.Context) (Book, error)
	// Commit marks the template as known, moves the name to it and stores the key.
	Commit(ctx context.Context, e Entry) error
	// Forget removes the template's mark, and those names and keys.
	Forget(ctx context.Context, id string, names, keys []string) error
}

// Book is everything that Records holds.
type Book struct {
	Known map[string]bool   // template IDs
	Names map[string]string // name -> template ID
	Keys  map[string]Key    // by idempotency key
}

// Key is a remembered idempotency key.
type Key struct {
	Digest     string `json:"digest"` // of the request it came with
	TemplateID string `json:"templateId"`
}

// Entry is what a finished build adds to the records. Name and Key may be empty.
type Entry struct {
	ID        string `json:"id"`
	Name      string `json:"name,omitempty"`
	Key       string `json:"key,omitempty"`
	KeyDigest string `json:"keyDigest,omitempty"`
}
