package qemu

import (
	"context"
	"os"

	"github.com/cubesandbox/cubelet/internal/vmm"
)

// Jail holds VMM processes. internal/runc implements it with runc containers.
type Jail interface {
	// Claim takes a slot for the owner, a prepared one or one made now, and applies the
	// limits. Claiming twice for one owner is an error.
	Claim(ctx context.Context, owner string, l vmm.Limits) (vmm.Instance, error)
	// Launch makes the owner's waiting launcher execve args[0] with files[i] as file
	// descriptor i, and returns when the execve succeeded. The files stay the caller's.
	Launch(ctx context.Context, owner string, args, env []string, files []*os.File) error
	// Destroy kills what runs in the owner's slot and returns when it is reaped and the
	// slot is gone. Succeeds when there is none.
	Destroy(ctx context.Context, owner string) error
	List(ctx context.Context) ([]vmm.Instance, error)
	// Wait blocks until the owner's process is gone. CodeNotFound when there is none.
	Wait(ctx context.Context, owner string) (vmm.Exit, error)
}
