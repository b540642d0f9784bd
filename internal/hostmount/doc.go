// Package hostmount keeps the daemon in a mount namespace of its own, which outlives it:
// what one daemon mounted, the pool above all, is there for the next one and for the
// sandboxes in between, while the host sees none of it. Mounts that the host makes later
// appear inside, as far as the host's mounts are shared.
//
// The namespace is pinned by a bind mount in the host's namespace:
//
//	DIR        mounted on itself and private, since a namespace's file can only be
//	           mounted outside of that namespace and must not spread into it
//	DIR/ns     the namespace
//	DIR/id     its identity, readable from inside, where DIR/ns shows nothing
//	DIR/lock   taken while the above is looked at and made
package hostmount
