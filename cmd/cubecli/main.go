// cubecli is the command line of a Cubelet node.
package main

import (
	"os"

	"github.com/cubesandbox/cubelet/internal/cli"
)

func main() {
	os.Exit(cli.Main(cli.Env{Args: os.Args[1:], Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.Getenv}))
}
