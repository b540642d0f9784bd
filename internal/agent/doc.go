// Package agent is the guest agent: it runs programs and moves files inside a sandbox.
//
// It speaks the protocol of E2B's guest daemon on one TCP port: the Connect services
// process.Process and filesystem.Filesystem and the plain HTTP endpoints /health, /init,
// /files, /metrics and /envs, to which it adds /signal and /shutdown for the host.
//
// The package needs no virtual machine: what it does to the machine it runs on goes
// through the interface Machine, which package boot implements for a guest. After a
// restore every instruction that runs for the first time costs the emulator a
// translation, so the way of a request to the first output of a program is kept short.
package agent
