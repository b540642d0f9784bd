package cube

import (
	"bytes"
	"encoding/json"
	"io"
	"net/netip"
	"path"
	"strconv"
	"strings"
)

// NetworkSpec is what a caller asks of a sandbox's network.
type NetworkSpec struct {
	// CIDR is the guest's own subnet: its first host is the gateway, its second the
	// guest. Empty means the same default subnet as in every other sandbox.
	CIDR string `json:"cidr,omitempty"`
}

// DefaultGuestSubnet is the guest's subnet when the spec names none: link-local, so that
// it can never hide a network that the guest wants to reach.
const DefaultGuestSubnet = "169.254.0.20/30"

// Validate checks the spec; its errors are of CodeInvalid with a field below "network".
func (n NetworkSpec) Validate() error {
	if n.CIDR == "" {
		return nil
	}
	_, _, err := n.Addresses()
	return err
}

// Addresses returns the gateway and the guest address of the spec, each with the
// subnet's prefix length.
func (n NetworkSpec) Addresses() (gateway, guest netip.Prefix, err error) {
	if n.CIDR == "" {
		gateway, guest = firstHosts(netip.MustParsePrefix(DefaultGuestSubnet))
		return gateway, guest, nil
	}
	p, err := netip.ParsePrefix(n.CIDR)
	if err != nil {
		return gateway, guest, InvalidField("network.cidr", "%q is not a subnet such as 192.168.10.0/24", n.CIDR)
	}
	switch {
	case !p.Addr().Is4():
		return gateway, guest, InvalidField("network.cidr", "%s: only IPv4 subnets are supported", p)
	case p != p.Masked():
		return gateway, guest, InvalidField("network.cidr", "%s has host bits set; did you mean %s?", p, p.Masked())
	case p.Bits() < 8 || p.Bits() > 30:
		return gateway, guest, InvalidField("network.cidr", "%s: the prefix length must be between 8 and 30", p)
	case p.Addr().IsLoopback(), p.Addr().IsMulticast(), p.Addr().IsUnspecified(), p.Addr().IsLinkLocalUnicast(), p.Addr().As4()[0] >= 224:
		return gateway, guest, InvalidField("network.cidr", "%s is not a subnet that a guest can have", p)
	}
	gateway, guest = firstHosts(p)
	return gateway, guest, nil
}

func firstHosts(p netip.Prefix) (gateway, guest netip.Prefix) {
	first := p.Addr().Next()
	return netip.PrefixFrom(first, p.Bits()), netip.PrefixFrom(first.Next(), p.Bits())
}

// HostMount asks for a host directory inside the guest.
type HostMount struct {
	HostPath      string `json:"hostPath"`
	ContainerPath string `json:"containerPath"`
	ReadOnly      bool   `json:"readOnly,omitempty"`
}

// Validate checks the shape of the mount; whether the node allows it is another matter.
func (m HostMount) Validate(field string) error {
	for _, p := range [...]struct{ name, v string }{{"hostPath", m.HostPath}, {"containerPath", m.ContainerPath}} {
		switch {
		case p.v == "":
			return InvalidField(field+"."+p.name, "is required")
		case !path.IsAbs(p.v), p.v != path.Clean(p.v), strings.ContainsRune(p.v, 0):
			return InvalidField(field+"."+p.name, "%q is not a clean absolute path", p.v)
		}
	}
	return nil
}

// HostMountKey is the metadata key that carries host mounts.
const HostMountKey = "host-mount"

// ParseMetadata decodes a sandbox's metadata from JSON: an object of strings, in which
// the key "host-mount" holds an array of host mounts (or a string with that array, as
// clients send whose metadata can only hold strings). Unknown fields are refused.
func ParseMetadata(b []byte) (map[string]string, []HostMount, error) {
	var raw map[string]json.RawMessage
	if err := decodeStrict(b, &raw); err != nil {
		return nil, nil, InvalidField("metadata", "%w", err)
	}
	meta := make(map[string]string, len(raw))
	var mounts []HostMount
	for k, v := range raw {
		if k == HostMountKey {
			var err error
			if mounts, err = ParseHostMounts(v); err != nil {
				return nil, nil, err
			}
			continue
		}
		var s *string
		if err := json.Unmarshal(v, &s); err != nil || s == nil {
			return nil, nil, InvalidField("metadata."+k, "the value must be a string")
		}
		meta[k] = *s
	}
	return meta, mounts, nil
}

// ParseHostMounts decodes the value of the metadata key "host-mount".
func ParseHostMounts(b []byte) ([]HostMount, error) {
	const field = "metadata." + HostMountKey
	var text string
	if json.Unmarshal(b, &text) == nil {
		b = []byte(text)
	}
	var mounts []HostMount
	if err := decodeStrict(b, &mounts); err != nil {
		return nil, InvalidField(field, "%w", err)
	}
	for i, m := range mounts {
		if err := m.Validate(field + "[" + strconv.Itoa(i) + "]"); err != nil {
			return nil, err
		}
	}
	return mounts, nil
}

// ParseNetwork decodes a network specification from JSON and validates it.
func ParseNetwork(b []byte) (NetworkSpec, error) {
	var n NetworkSpec
	if err := decodeStrict(b, &n); err != nil {
		return NetworkSpec{}, InvalidField("network", "%w", err)
	}
	return n, n.Validate()
}

// decodeStrict decodes exactly one JSON value and refuses unknown fields.
func decodeStrict(b []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		if err == io.EOF {
			return Errorf(CodeInvalid, "empty JSON")
		}
		return err
	}
	if _, err := d.Token(); err != io.EOF {
		return Errorf(CodeInvalid, "text after the JSON value")
	}
	return nil
}
