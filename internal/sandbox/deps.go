package sandbox

import (
	"context"
	"net"
	"os"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/guestapi"
	"github.com/cubesandbox/cubelet/internal/tplimage"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// The interfaces that the engine needs of the adapters. Every method that takes an
// owner is keyed by the sandbox's ID; every Destroy, Release and Remove is idempotent
// and succeeds when there is nothing to do, since it serves as a step's undo.

// VMMs runs virtual machines, each in a runc container (a slot) of its own.
type VMMs interface {
	// Claim takes a slot for the owner, a prepared one or one made now, and applies the
	// limits. Claiming twice for one owner is an error.
	Claim(ctx context.Context, owner string, l vmm.Limits) (vmm.Instance, error)
	// Launch runs m in the owner's slot with the tap as its network card and returns
	// when the guest runs: its vCPUs go on (restore) or its kernel is started (boot).
	// The tap stays the caller's.
	Launch(ctx context.Context, owner string, m vmm.Machine, tap *os.File) (vmm.Instance, error)
	// Freeze saves a running machine as it is at one instant and lets it go on. Its files
	// are not synced. Codes: NotFound, FailedPrecondition (no QEMU), NoSpace.
	Freeze(ctx context.Context, owner string, f vmm.Freeze) (vmm.Frozen, error)
	// Pause stops the vCPUs, Resume lets them go on; both may find it done.
	Pause(ctx context.Context, owner string) error
	Resume(ctx context.Context, owner string) error
	// Tap returns the tap of the owner's running machine, for another machine to take
	// over. The caller closes it.
	Tap(ctx context.Context, owner string) (*os.File, error)
	// Destroy kills the VMM and returns when its process is reaped and its slot gone.
	Destroy(ctx context.Context, owner string) error
	// List returns every claimed slot, also those claimed by an earlier daemon.
	List(ctx context.Context) ([]vmm.Instance, error)
	// Wait blocks until the owner's VMM process is gone. CodeNotFound when there is none.
	Wait(ctx context.Context, owner string) (vmm.Exit, error)
}

// Network gives each sandbox a network namespace with a tap device in it.
type Network interface {
	// Claim takes a network slot for the owner, a prepared one or one made now, and sets
	// the addresses of the spec. The caller closes the tap.
	Claim(ctx context.Context, owner string, spec cube.NetworkSpec) (tap *os.File, err error)
	// Release destroys the slot; it is never used again.
	Release(ctx context.Context, owner string) error
	// List returns the owners of claimed slots, also those claimed by an earlier daemon.
	List(ctx context.Context) ([]string, error)
	// Dial opens a TCP connection to the guest from inside its namespace.
	Dial(ctx context.Context, owner string, port int) (net.Conn, error)
}

// Disks keeps each owner's files in a directory of its own on the pool.
type Disks interface {
	// Create makes the owner's directory (0700) and returns its path. Existing: an error.
	Create(ctx context.Context, owner string) (dir string, err error)
	// Clone makes dst a copy-on-write copy of src. Codes: NotFound, AlreadyExists, NoSpace.
	Clone(ctx context.Context, src, dst string) error
	// Link makes dst another name of the file src. Codes: NotFound, AlreadyExists.
	Link(ctx context.Context, src, dst string) error
	// Flush writes a file's data to the disk, so that a clone of it is quick.
	Flush(ctx context.Context, path string) error
	// Sync makes files of one directory and their names durable.
	Sync(ctx context.Context, paths ...string) error
	// Drop removes files; those that are not there are no error.
	Drop(ctx context.Context, paths ...string) error
	// Remove deletes the owner's directory.
	Remove(ctx context.Context, owner string) error
	// List returns the owners that have a directory.
	List(ctx context.Context) ([]string, error)
}

// Image is everything a sandbox needs of a template at one size.
type Image = tplimage.Image

// Templates hands out images and counts who uses them.
type Templates interface {
	// Acquire resolves ref and returns the image of that size (zero fields: the
	// template's), building the memory image of a new size first. The template cannot be
	// deleted until user releases it. Codes: NotFound, Invalid (size), and those of a build.
	Acquire(ctx context.Context, ref string, size cube.Resources, user string) (Image, error)
	// Hold marks a template as used without preparing an image, for a sandbox found in
	// the journal at start. It succeeds for a template that is gone.
	Hold(templateID, user string)
	Release(templateID, user string)
	// Resolve returns the ID that ref means. Codes: NotFound, Invalid (ambiguous).
	Resolve(ctx context.Context, ref string) (string, error)
}

// Snapshots is the catalogue of snapshots.
type Snapshots interface {
	// Begin journals a snapshot that is being made, and makes its directory. The ID and
	// the name must be free. Codes: Invalid, AlreadyExists, NoSpace.
	Begin(ctx context.Context, s cube.Snapshot) (dir string, err error)
	// Publish makes the files in the directory durable and the snapshot visible. The
	// paths of the image lie in the directory.
	Publish(ctx context.Context, s cube.Snapshot, img Image) (cube.Snapshot, error)
	// Discard undoes Begin. It succeeds when there is nothing.
	Discard(ctx context.Context, id string) error
	// Acquire returns the image of a snapshot, and marks the snapshot as used. Codes:
	// NotFound, Invalid (ambiguous), FailedPrecondition (made for another machine).
	Acquire(ctx context.Context, ref, user string) (cube.Snapshot, Image, error)
	// Hold marks a snapshot as used. It succeeds for one that is gone.
	Hold(id, user string)
	Release(id, user string)
	// Delete removes a snapshot; its users' files stay until they let go of them.
	Delete(ctx context.Context, ref string, force bool) error
}

// GuestInit is what the agent is told after every restore.
type GuestInit = guestapi.Init

// Guest talks to a guest agent over connections from dial.
type Guest interface {
	// Init identifies the sandbox to its agent. It waits for the agent to answer.
	Init(ctx context.Context, dial Dialer, in GuestInit) error
	Exec(ctx context.Context, dial Dialer, token string, spec cube.ExecSpec) (cube.ExecSession, error)
}

// Dialer opens a connection to a port of one guest.
type Dialer = guestapi.Dialer
