// Command vmm-launcher is the first process of a VMM container. It waits on a unix
// socket for one launch message and becomes the program that the message names.
// Cubelet starts it; see internal/launch for the protocol.
package main

import (
	"os"

	"github.com/cubesandbox/cubelet/internal/launch"
)

func main() {
	if len(os.Args) != 2 {
		fail("usage: vmm-launcher SOCKET")
	}
	fail(launch.Serve(os.Args[1]).Error())
}

func fail(text string) {
	_, _ = os.Stderr.WriteString("vmm-launcher: " + text + "\n")
	os.Exit(1)
}
