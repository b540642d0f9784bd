package main

import (
	"path/filepath"

	"github.com/cubesandbox/cubelet/internal/daemon"
	"github.com/cubesandbox/cubelet/internal/hostmount"
)

// needNewMnt reports whether this process has yet to go into the node's own mount
// namespace.
func needNewMnt(cfg *daemon.Config) bool { return !hostmount.Inside(mntDir(cfg)) }

// newCubeMnt goes into the node's mount namespace, which outlives the daemon, by starting
// this program anew in it. When that cannot be done within seconds it returns, and the
// node works in the namespace that it is in: its mounts are then visible to the host.
// Call it before anything is set up.
func newCubeMnt(cfg *daemon.Config) {
	if err := hostmount.Enter(hostmount.Config{Dir: mntDir(cfg), Log: cfg.Log}); err != nil {
		cfg.Log.Warn("no mount namespace of our own: the node's mounts are visible to the host", "err", err)
	}
}

func mntDir(cfg *daemon.Config) string { return filepath.Join(cfg.Root, "run", "mnt") }
