// Command gendocs writes the documents that are generated from code: docs/states.md from
// the phase table of package cube. Run it in the repository's root.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	cube "github.com/cubesandbox/cubelet"
)

func main() {
	path := filepath.Join("docs", "states.md")
	if err := os.WriteFile(path, []byte(states()), 0o644); err != nil { //nolint:gosec // a document is for everybody
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// states renders the phase table.
func states() string {
	var b strings.Builder
	b.WriteString(`# Phases of a sandbox

<!-- Generated from the phase table in phase.go by "go run ./internal/gendocs". Do not edit. -->

A sandbox is in one of these phases, and moves only along these arrows. A deleted sandbox
has no record and so no phase: it is where the drawing ends.

` + "```mermaid\nstateDiagram-v2\n")
	fmt.Fprintf(&b, "    [*] --> %s: create\n", cube.PhaseCreating)
	for _, from := range cube.Phases() {
		for _, to := range from.Next() {
			fmt.Fprintf(&b, "    %s --> %s\n", from, to)
		}
	}
	fmt.Fprintf(&b, "    %s --> [*]: nothing is left\n", cube.PhaseDeleting)
	b.WriteString("```\n\n| phase | meaning | may move to |\n|---|---|---|\n")
	for _, p := range cube.Phases() {
		next := make([]string, 0, len(p.Next()))
		for _, to := range p.Next() {
			next = append(next, to.String())
		}
		fmt.Fprintf(&b, "| %s | %s | %s |\n", p, meaning(p), strings.Join(next, ", "))
	}
	return b.String()
}

func meaning(p cube.Phase) string {
	switch p {
	case cube.PhaseCreating:
		return "its record is written and its parts are being made; a restart of the daemon undoes it"
	case cube.PhaseRunning:
		return "its guest agent has answered; programs can be run in it"
	case cube.PhasePausing:
		return "its virtual CPUs are being stopped and its memory saved"
	case cube.PhasePaused:
		return "its memory and disks are saved; it uses neither CPU nor memory"
	case cube.PhaseResuming:
		return "it is being restored from what was saved"
	case cube.PhaseStopping:
		return "its guest is being shut down"
	case cube.PhaseStopped:
		return "its guest is shut down and its disks are kept"
	case cube.PhaseDeleting:
		return "its parts are being removed; nothing brings it back"
	case cube.PhaseFailed:
		return "its VMM died, or a step and its undo failed; the reason says which. It can be deleted"
	}
	panic("gendocs: phase " + p.String() + " has no meaning")
}
