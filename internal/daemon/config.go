package daemon

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"

	cube "github.com/cubesandbox/cubelet"
)

// DefaultRoot is the directory of a node that is told nothing else.
const DefaultRoot = "/var/lib/cubelet"

// Config is what a node is started with; cmd/cubelet fills it from flags.
type Config struct {
	Root       string // absolute
	Name       string // of the node; empty: the host's name
	KernelDir  string // vmlinuz, release, modules/; empty: Root/kernel
	LibexecDir string // cube-agent, vmm-launcher, containerd-shim-runc-v2
	QEMU       string // binary, empty: qemu-system-x86_64
	Runc       string // binary, empty: runc
	Accel      string // auto, tcg or kvm

	Address           string // of the unix socket; empty: Root/run/cubelet.sock
	ContainerdAddress string // of an external containerd; empty: embedded
	TLS               TLSConfig

	PoolBytes    int64        // size of the pool image when it is made
	HostPrefix   netip.Prefix // of the host side of sandbox networks; zero: chosen
	VMMSlots     int          // launchers kept waiting
	NetworkSlots int          // network namespaces kept waiting
	MaxSandboxes int

	Version cube.Version
	Log     *slog.Logger
}

// TLSConfig makes the node listen on TCP. All fields are set or none.
type TLSConfig struct {
	Listen, Cert, Key, ClientCA string
}

// Validate fills in defaults and checks the values. Codes: Invalid.
func (c *Config) Validate() error {
	if !filepath.IsAbs(c.Root) {
		return cube.InvalidField("root", "%q is not an absolute path", c.Root)
	}
	c.Root = filepath.Clean(c.Root)
	// A shim's socket is <socket dir>/<64 characters> and must fit 107 bytes.
	if p := c.layout().shims; len(p) > 42 {
		return cube.InvalidField("root", "%s is too long: sockets below it would not fit; at most %d bytes", c.Root, len(c.Root)-len(p)+42)
	}
	if c.Name == "" {
		host, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("host name: %w", err)
		}
		c.Name = host
	}
	if c.KernelDir == "" {
		c.KernelDir = filepath.Join(c.Root, "kernel")
	}
	if c.LibexecDir == "" {
		exe, err := os.Executable()
		if err != nil {
			return fmt.Errorf("own path: %w", err)
		}
		c.LibexecDir = filepath.Dir(exe)
	}
	if c.QEMU == "" {
		c.QEMU = "qemu-system-x86_64"
	}
	if c.Runc == "" {
		c.Runc = "runc"
	}
	if c.Address == "" {
		c.Address = c.layout().socket
	}
	return c.TLS.validate()
}

func (t TLSConfig) validate() error {
	set := 0
	for _, v := range [...]string{t.Listen, t.Cert, t.Key, t.ClientCA} {
		if v != "" {
			set++
		}
	}
	if set != 0 && set != 4 {
		return cube.InvalidField("tls", "--listen, --tls-cert, --tls-key and --tls-client-ca go together; plain TCP is not offered")
	}
	return nil
}

// layout names every path below the root.
type layout struct {
	root, run, pool, poolImage, journal, initrd, containerd string
	lock, socket, state, shims, containerdSock              string
	runcRoot, vmm, qemu, net, mnt, boot                     string
}

func (c *Config) layout() layout {
	at := func(p ...string) string { return filepath.Join(append([]string{c.Root}, p...)...) }
	return layout{
		root: c.Root, run: at("run"), pool: at("pool"), poolImage: at("pool.img"),
		journal: at("journal.db"), initrd: at("initrd.img"), containerd: at("containerd"),
		lock: at("cubelet.pid"), socket: at("run", "cubelet.sock"),
		state: at("run", "c"), shims: at("run", "s"), containerdSock: at("run", "containerd.sock"),
		runcRoot: at("run", "runc"), vmm: at("run", "vmm"), qemu: at("run", "qemu"), net: at("run", "net"),
		mnt: at("run", "mnt"), boot: at("run", "boot_id"),
	}
}

// tag is a short name of the node, unique on the host because the root is: it is part
// of the names of links, tables and cgroups.
func (c *Config) tag() string {
	sum := sha256.Sum256([]byte(c.Root))
	return hex.EncodeToString(sum[:2])
}
