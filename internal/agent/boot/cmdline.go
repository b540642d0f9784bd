package boot

import "strings"

// Options are the kernel command line's keys for the agent.
type Options struct {
	Root    string // cube.root: block device with the read-only root file system
	Layer   string // cube.layer: block device with the writable layer
	Address string // cube.address: of eth0, with its prefix length
	Gateway string // cube.gateway
}

// ParseCmdline returns the options in a kernel command line. Other words are not ours.
func ParseCmdline(line string) Options {
	var o Options
	for _, word := range strings.Fields(line) {
		key, value, _ := strings.Cut(word, "=")
		switch key {
		case "cube.root":
			o.Root = value
		case "cube.layer":
			o.Layer = value
		case "cube.address":
			o.Address = value
		case "cube.gateway":
			o.Gateway = value
		}
	}
	return o
}
