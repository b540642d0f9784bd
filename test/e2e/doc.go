// Package e2e drives a real node from end to end: a cubelet process with its own root
// and network namespace, real containerd, runc, XFS, nftables and QEMU guests.
package e2e
