package networkagent

import (
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

const (
	tablePrefix = "cubelet-" // of the host's tables, the node's tag follows
	prefixSet   = "prefix"   // set of the host's table that holds the node's HostPrefix
	guestTable  = "cubelet"  // table in every sandbox's namespace
	guestSet    = "guest"    // addresses that the guest may send from
)

// ruleset is one nftables table as data. It is applied as a whole.
type ruleset struct {
	table  string
	set    addressSet
	chains []chain
}

type addressSet struct {
	name     string
	prefixes []netip.Prefix
}

type chain struct {
	name     string
	kind     nftables.ChainType
	hook     *nftables.ChainHook
	priority *nftables.ChainPriority
	policy   nftables.ChainPolicy
	rules    []rule
}

// rule is a list of expressions and the comment that people see in `nft list`; the
// comments also tell whether the table in the kernel is the one that was applied.
type rule struct {
	comment string
	exprs   []expr.Any
}

func r(comment string, parts ...[]expr.Any) rule {
	out := rule{comment: comment}
	for _, p := range parts {
		out.exprs = append(out.exprs, p...)
	}
	return out
}

// hostRules is the host's side of a node. Links are matched by the beginning of their
// names, so a claim changes nothing here.
//
// Private ranges that the host can reach are reachable for guests as well: what a
// sandbox may reach beyond this floor is for its policy to say.
func hostRules(table, links string, prefix netip.Prefix) ruleset {
	from, to := name(expr.MetaKeyIIFNAME, links, false), name(expr.MetaKeyOIFNAME, links, false)
	return ruleset{
		table: table,
		set:   addressSet{prefixSet, []netip.Prefix{prefix}},
		chains: []chain{
			{
				name: "prerouting", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookPrerouting,
				priority: nftables.ChainPriorityRaw, policy: nftables.ChainPolicyAccept,
				rules: []rule{
					r("sandboxes have no IPv6", from, notIPv4(), verdict(expr.VerdictDrop)),
					r("a source address that is not of this link", from, noRouteBack(), verdict(expr.VerdictDrop)),
					// Before destination NAT, so that a port that the host publishes is
					// closed as well.
					r("no sandbox reaches the host", from, toLocal(false), verdict(expr.VerdictDrop)),
				},
			},
			{
				name: "input", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookInput,
				priority: nftables.ChainPriorityFilter, policy: nftables.ChainPolicyAccept,
				rules: []rule{r("no sandbox reaches the host", from, verdict(expr.VerdictDrop))},
			},
			{
				name: "forward", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookForward,
				priority: nftables.ChainPriorityFilter, policy: nftables.ChainPolicyAccept,
				rules: []rule{
					r("no sandbox reaches another", from, to, verdict(expr.VerdictDrop)),
					r("no metadata service", from, toNetwork(netip.MustParsePrefix("169.254.0.0/16")), verdict(expr.VerdictDrop)),
					r("answers", to, state(expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), verdict(expr.VerdictAccept)),
					r("nobody calls a sandbox", to, verdict(expr.VerdictDrop)),
					r("segments fit the way out", from, clampMSS()),
				},
			},
			{
				name: "postrouting", kind: nftables.ChainTypeNAT, hook: nftables.ChainHookPostrouting,
				priority: nftables.ChainPriorityNATSource, policy: nftables.ChainPolicyAccept,
				rules: []rule{r("sandboxes speak as the host", from, []expr.Any{&expr.Masq{}})},
			},
		},
	}
}

// guestRules is the table in a sandbox's namespace. The guest may only speak as one of
// the addresses in guestSet, reaches nothing of the namespace but an echo of its
// gateway, and is reached by what the daemon dials from inside.
func guestRules() ruleset {
	from, to := name(expr.MetaKeyIIFNAME, tapName, true), name(expr.MetaKeyOIFNAME, tapName, true)
	in, out := name(expr.MetaKeyIIFNAME, uplinkName, true), name(expr.MetaKeyOIFNAME, uplinkName, true)
	answers := state(expr.CtStateBitESTABLISHED | expr.CtStateBitRELATED)
	_, guest := defaultAddresses()
	return ruleset{
		table: guestTable,
		set:   addressSet{guestSet, []netip.Prefix{netip.PrefixFrom(guest.Addr(), 32)}},
		chains: []chain{
			{
				name: "prerouting", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookPrerouting,
				priority: nftables.ChainPriorityRaw, policy: nftables.ChainPolicyAccept,
				rules: []rule{
					r("no IPv6", from, notIPv4(), verdict(expr.VerdictDrop)),
					r("the guest speaks as itself", from, sourceNotIn(guestSet), verdict(expr.VerdictDrop)),
				},
			},
			{
				name: "input", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookInput,
				priority: nftables.ChainPriorityFilter, policy: nftables.ChainPolicyDrop,
				rules: []rule{
					r("answers to what the daemon dials", answers, verdict(expr.VerdictAccept)),
					r("the gateway answers an echo", from, echoRequest(), toLocal(true), limit(20), verdict(expr.VerdictAccept)),
				},
			},
			{
				name: "forward", kind: nftables.ChainTypeFilter, hook: nftables.ChainHookForward,
				priority: nftables.ChainPriorityFilter, policy: nftables.ChainPolicyDrop,
				rules: []rule{
					r("untracked packets would leave without NAT", state(expr.CtStateBitINVALID), verdict(expr.VerdictDrop)),
					r("the guest calls", from, out, verdict(expr.VerdictAccept)),
					r("answers", in, to, answers, verdict(expr.VerdictAccept)),
				},
			},
			{
				name: "postrouting", kind: nftables.ChainTypeNAT, hook: nftables.ChainHookPostrouting,
				priority: nftables.ChainPriorityNATSource, policy: nftables.ChainPolicyAccept,
				rules: []rule{r("the namespace speaks as its link", out, []expr.Any{&expr.Masq{}})},
			},
		},
	}
}

func verdict(k expr.VerdictKind) []expr.Any { return []expr.Any{&expr.Verdict{Kind: k}} }

func compare(op expr.CmpOp, data []byte) *expr.Cmp {
	return &expr.Cmp{Op: op, Register: 1, Data: data}
}

// name matches a link by its whole name, or by the beginning of it.
func name(key expr.MetaKey, s string, whole bool) []expr.Any {
	data := []byte(s)
	if whole {
		data = make([]byte, unix.IFNAMSIZ)
		copy(data, s)
	}
	return []expr.Any{&expr.Meta{Key: key, Register: 1}, compare(expr.CmpOpEq, data)}
}

func notIPv4() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		compare(expr.CmpOpNeq, []byte{unix.NFPROTO_IPV4}),
	}
}

func isIPv4() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		compare(expr.CmpOpEq, []byte{unix.NFPROTO_IPV4}),
	}
}

func protocol(p byte) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		compare(expr.CmpOpEq, []byte{p}),
	}
}

func state(bits uint32) []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Bitwise{
			SourceRegister: 1, DestRegister: 1, Len: 4,
			Mask: binaryutil.NativeEndian.PutUint32(bits), Xor: make([]byte, 4),
		},
		compare(expr.CmpOpNeq, make([]byte, 4)),
	}
}

// noRouteBack matches a packet whose source is not routed to the link it came from.
func noRouteBack() []expr.Any {
	return []expr.Any{
		&expr.Fib{Register: 1, FlagSADDR: true, FlagIIF: true, ResultOIF: true},
		compare(expr.CmpOpEq, make([]byte, 4)),
	}
}

// toLocal matches a packet for an address of this namespace, or of the link it came by.
func toLocal(sameLink bool) []expr.Any {
	return []expr.Any{
		&expr.Fib{Register: 1, FlagDADDR: true, FlagIIF: sameLink, ResultADDRTYPE: true},
		compare(expr.CmpOpEq, binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL)),
	}
}

func address(offset uint32) *expr.Payload {
	return &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4}
}

func toNetwork(p netip.Prefix) []expr.Any {
	mask := binaryutil.BigEndian.PutUint32(^uint32(0) << (32 - p.Bits()))
	return append(isIPv4(),
		address(16),
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: mask, Xor: make([]byte, 4)},
		compare(expr.CmpOpEq, p.Addr().AsSlice()),
	)
}

func sourceNotIn(set string) []expr.Any {
	return append(isIPv4(), address(12), &expr.Lookup{SourceRegister: 1, SetName: set, Invert: true})
}

func echoRequest() []expr.Any {
	const icmpEchoRequest = 8
	return append(protocol(unix.IPPROTO_ICMP),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 1},
		compare(expr.CmpOpEq, []byte{icmpEchoRequest}),
	)
}

func limit(perSecond uint64) []expr.Any {
	return []expr.Any{&expr.Limit{
		Type: expr.LimitTypePkts, Rate: perSecond, Unit: expr.LimitTimeSecond, Burst: uint32(perSecond),
	}}
}

// clampMSS lowers the segment size that a SYN announces to what its route can carry.
func clampMSS() []expr.Any {
	const (
		synFlag   = 0x02
		optionMSS = 2
	)
	return append(protocol(unix.IPPROTO_TCP),
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{synFlag}, Xor: []byte{0}},
		compare(expr.CmpOpNeq, []byte{0}),
		&expr.Rt{Register: 1, Key: expr.RtTCPMSS},
		&expr.Byteorder{SourceRegister: 1, DestRegister: 1, Op: expr.ByteorderHton, Len: 2, Size: 2},
		&expr.Exthdr{SourceRegister: 1, Type: optionMSS, Offset: 2, Len: 2, Op: expr.ExthdrOpTcpopt},
	)
}
