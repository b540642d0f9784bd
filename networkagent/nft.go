package networkagent

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"
)

// apply makes the table of the calling thread's network namespace exactly rs, in one
// transaction: no packet ever meets half a table.
func apply(rs ruleset) error {
	conn, err := nftables.New()
	if err != nil {
		return fmt.Errorf("apply nftables table %s: %w", rs.table, err)
	}
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: rs.table}
	conn.AddTable(table)
	conn.DelTable(table)
	table = conn.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: rs.table})
	set := addressSetOf(table, rs.set.name)
	if err := conn.AddSet(set, elements(rs.set.prefixes)); err != nil {
		return fmt.Errorf("apply nftables table %s: set %s: %w", rs.table, rs.set.name, err)
	}
	for _, c := range rs.chains {
		policy := c.policy
		added := conn.AddChain(&nftables.Chain{
			Table: table, Name: c.name, Type: c.kind, Hooknum: c.hook, Priority: c.priority, Policy: &policy,
		})
		for _, r := range c.rules {
			conn.AddRule(&nftables.Rule{
				Table: table, Chain: added, Exprs: r.exprs,
				UserData: userdata.AppendString(nil, userdata.TypeComment, r.comment),
			})
		}
	}
	if err := conn.Flush(); err != nil {
		return fmt.Errorf("apply nftables table %s: %w", rs.table, err)
	}
	return nil
}

// differs tells how the table of the calling thread's network namespace differs from
// rs, in words; empty when it does not.
func differs(rs ruleset) (string, error) {
	conn, err := nftables.New()
	if err != nil {
		return "", fmt.Errorf("read nftables table %s: %w", rs.table, err)
	}
	chains, err := conn.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return "", fmt.Errorf("read nftables chains: %w", err)
	}
	chains = slices.DeleteFunc(chains, func(c *nftables.Chain) bool { return c.Table.Name != rs.table })
	if len(chains) == 0 {
		return fmt.Sprintf("nftables table inet %s is missing", rs.table), nil
	}
	for _, want := range rs.chains {
		i := slices.IndexFunc(chains, func(c *nftables.Chain) bool { return c.Name == want.name })
		if i < 0 {
			return fmt.Sprintf("nftables table inet %s lacks chain %s", rs.table, want.name), nil
		}
		rules, err := conn.GetRules(chains[i].Table, chains[i])
		if err != nil {
			return "", fmt.Errorf("read nftables chain %s of %s: %w", want.name, rs.table, err)
		}
		if !slices.EqualFunc(rules, want.rules, sameRule) {
			return fmt.Sprintf("chain %s of nftables table inet %s was changed", want.name, rs.table), nil
		}
	}
	return "", nil
}

// sameRule goes by the comment: whoever replaces a rule replaces its comment too.
func sameRule(got *nftables.Rule, want rule) bool {
	comment, ok := userdata.GetString(got.UserData, userdata.TypeComment)
	return ok && comment == want.comment
}

// removeTable deletes a table of the calling thread's network namespace, if there.
func removeTable(name string) error {
	conn, err := nftables.New()
	if err != nil {
		return fmt.Errorf("remove nftables table %s: %w", name, err)
	}
	conn.DelTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: name})
	if err := conn.Flush(); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove nftables table %s: %w", name, err)
	}
	return nil
}

// allow adds addresses to the set that the guest may send from.
func allow(addrs ...netip.Addr) error {
	conn, err := nftables.New()
	if err != nil {
		return fmt.Errorf("allow guest addresses: %w", err)
	}
	var prefixes []netip.Prefix
	for _, a := range addrs {
		prefixes = append(prefixes, netip.PrefixFrom(a, 32))
	}
	set := addressSetOf(&nftables.Table{Family: nftables.TableFamilyINet, Name: guestTable}, guestSet)
	if err := conn.SetAddElements(set, elements(prefixes)); err != nil {
		return fmt.Errorf("allow guest addresses: %w", err)
	}
	if err := conn.Flush(); err != nil {
		return fmt.Errorf("allow guest addresses: %w", err)
	}
	return nil
}

// nodePrefixes returns what the tables of all nodes on this machine reserve, by table.
func nodePrefixes() (map[string]netip.Prefix, error) {
	conn, err := nftables.New()
	if err != nil {
		return nil, fmt.Errorf("read nftables tables: %w", err)
	}
	tables, err := conn.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, fmt.Errorf("read nftables tables: %w", err)
	}
	found := map[string]netip.Prefix{}
	for _, t := range tables {
		if !strings.HasPrefix(t.Name, tablePrefix) {
			continue
		}
		got, err := conn.GetSetElements(addressSetOf(t, prefixSet))
		if err != nil {
			continue // gone meanwhile, or not a node's
		}
		if p, ok := prefixOf(got); ok {
			found[t.Name] = p
		}
	}
	return found, nil
}

func addressSetOf(t *nftables.Table, name string) *nftables.Set {
	// The ID only tells apart the sets of one transaction. The library would take it from
	// a counter that is not safe for concurrent use.
	return &nftables.Set{ID: 1, Table: t, Name: name, KeyType: nftables.TypeIPAddr, Interval: true}
}

// elements lists prefixes as an interval set has them: first address, and end + 1.
func elements(prefixes []netip.Prefix) []nftables.SetElement {
	var out []nftables.SetElement
	for _, p := range prefixes {
		out = append(out,
			nftables.SetElement{Key: p.Addr().AsSlice()},
			nftables.SetElement{Key: last(p).Next().AsSlice(), IntervalEnd: true})
	}
	return out
}

// prefixOf is the inverse of elements for a set of one prefix.
func prefixOf(got []nftables.SetElement) (netip.Prefix, bool) {
	var first, end netip.Addr
	for _, e := range got {
		a, ok := netip.AddrFromSlice(e.Key)
		switch {
		case !ok || !a.Is4():
			return netip.Prefix{}, false
		case !e.IntervalEnd:
			first = a
		case !a.IsUnspecified():
			end = a
		}
	}
	if !first.IsValid() || !end.IsValid() {
		return netip.Prefix{}, false
	}
	for bits := 1; bits <= 32; bits++ {
		p := netip.PrefixFrom(first, bits)
		if p == p.Masked() && last(p).Next() == end {
			return p, true
		}
	}
	return netip.Prefix{}, false
}

// last returns the highest address of an IPv4 prefix.
func last(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().As4()
	for i := range b {
		ones := min(max(p.Bits()-8*i, 0), 8)
		b[i] |= 0xff >> ones
	}
	return netip.AddrFrom4(b)
}
