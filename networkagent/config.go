package networkagent

import (
	"fmt"
	"hash/fnv"
	"log/slog"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"

	cube "github.com/cubesandbox/cubelet"
)

// Config describes one node's network agent.
type Config struct {
	// RunDir holds the pinned namespaces and the owner records. It is made when missing
	// and belongs to one Agent at a time; the caller sees to that.
	RunDir string
	// Node tells apart the nodes of one machine: one to six lower-case letters and
	// digits, part of the name of every link and nftables table that the agent makes.
	// Empty: derived from RunDir.
	Node string
	// HostPrefix is the IPv4 range for the links between namespaces and host, two
	// addresses a sandbox, at least a /24 and at most a /12. Zero: the one used before,
	// else the first of a few private ranges that overlaps nothing on this host.
	HostPrefix netip.Prefix
	// Target is the number of slots to keep ready. Zero: every claim makes its own.
	Target int
	// Resolvers is what guests are told to ask for names. Empty: those of the host that a
	// guest can reach.
	Resolvers []netip.Addr
	Log       *slog.Logger // nil: nothing is logged
}

const (
	tagDigits = "abcdefghijklmnopqrstuvwxyz0123456789"
	tagLength = 6
)

// complete returns the configuration with its defaults, if it is a valid one.
func (c Config) complete() (Config, error) {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	c.RunDir = filepath.Clean(c.RunDir)
	if c.Node == "" {
		h := fnv.New64a()
		_, _ = h.Write([]byte(c.RunDir)) // cannot fail
		s := strconv.FormatUint(h.Sum64(), len(tagDigits))
		c.Node = fmt.Sprintf("%0*s", tagLength, s)[:tagLength]
	}
	return c, c.validate()
}

func (c Config) validate() error {
	switch {
	case !filepath.IsAbs(c.RunDir):
		return cube.InvalidField("runDir", "%q is not an absolute path", c.RunDir)
	case c.Node == "", len(c.Node) > tagLength, strings.Trim(c.Node, tagDigits) != "":
		return cube.InvalidField("node", "%q is not one to six lower-case letters and digits", c.Node)
	case c.Target < 0:
		return cube.InvalidField("target", "%d is negative", c.Target)
	}
	if p := c.HostPrefix; p != (netip.Prefix{}) {
		if !p.IsValid() || !p.Addr().Is4() || p != p.Masked() || p.Bits() < 12 || p.Bits() > 24 {
			return cube.InvalidField("hostPrefix", "%s is not an IPv4 network between /12 and /24", p)
		}
	}
	return nil
}

// linkPrefix begins the name of every host link of the node; a slot's number follows.
// At most nine bytes, which leaves six for the number.
func (c Config) linkPrefix() string { return "cl" + c.Node + "-" }

func (c Config) tableName() string { return tablePrefix + c.Node }

func (c Config) records() records {
	return records{dir: filepath.Join(c.RunDir, "owners"), links: c.linkPrefix()}
}

func (c Config) slotPath(name string) string { return filepath.Join(c.RunDir, name) }

func (c Config) slotName(index int) string { return fmt.Sprintf("%s%d", c.linkPrefix(), index) }

// slots is the number of address pairs in a prefix.
func slots(p netip.Prefix) int { return 1 << (31 - p.Bits()) }

// pair returns the two addresses of a slot: the host's end and the namespace's.
func pair(p netip.Prefix, index int) (host, inside netip.Prefix) {
	b := p.Addr().As4()
	n := uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
	n += uint32(2 * index)
	a := netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
	return netip.PrefixFrom(a, 31), netip.PrefixFrom(a.Next(), 31)
}
