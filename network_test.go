package cube_test

import (
	"encoding/json"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	cube "github.com/cubesandbox/cubelet"
)

func TestParseNetwork(t *testing.T) {
	for _, tc := range []struct{ in, want string }{
		{`{}`, ""},
		{`{"cidr":""}`, ""},
		{`{"cidr":"192.168.10.0/24"}`, "192.168.10.0/24"},
		{` {"cidr":"10.0.0.0/8"} `, "10.0.0.0/8"},
		{`{"cidr":"10.1.2.4/30"}`, "10.1.2.4/30"},
	} {
		got, err := cube.ParseNetwork([]byte(tc.in))
		if err != nil || got.CIDR != tc.want {
			t.Errorf("%s: %+v, %v", tc.in, got, err)
		}
	}
}

func TestParseNetworkRefuses(t *testing.T) {
	for _, tc := range []struct{ in, field, text string }{
		{``, "network", "empty"},
		{`nonsense`, "network", "invalid character"},
		{`{"cidr":"10.0.0.0/24"`, "network", "unexpected EOF"},
		{`{"cidr":"10.0.0.0/24"} {}`, "network", "after"},
		{`{"cidr":"10.0.0.0/24","mtu":1500}`, "network", "mtu"},
		{`{"cidr":7}`, "network", "string"},
		{`[]`, "network", "array"},
		{`{"cidr":"10.0.0.1/24"}`, "network.cidr", "10.0.0.0/24"},
		{`{"cidr":"10.0.0.0"}`, "network.cidr", "subnet"},
		{`{"cidr":"10.0.0.0/33"}`, "network.cidr", "subnet"},
		{`{"cidr":"10.0.0.0/31"}`, "network.cidr", "between"},
		{`{"cidr":"0.0.0.0/0"}`, "network.cidr", "between"},
		{`{"cidr":"0.0.0.0/8"}`, "network.cidr", "cannot|can have"},
		{`{"cidr":"127.0.0.0/8"}`, "network.cidr", "can have"},
		{`{"cidr":"169.254.0.0/16"}`, "network.cidr", "can have"},
		{`{"cidr":"224.0.0.0/24"}`, "network.cidr", "can have"},
		{`{"cidr":"255.255.255.0/24"}`, "network.cidr", "can have"},
		{`{"cidr":"fd00::/64"}`, "network.cidr", "IPv4"},
		{`{"cidr":"::ffff:10.0.0.0/120"}`, "network.cidr", "IPv4|subnet"},
	} {
		_, err := cube.ParseNetwork([]byte(tc.in))
		wantInvalid(t, tc.in, err, tc.field, tc.text)
	}
}

// wantInvalid checks code, field and a part of the text (alternatives split by "|").
func wantInvalid(t *testing.T, in string, err error, field, text string) {
	t.Helper()
	var e *cube.Error
	if !errors.As(err, &e) || e.Code != cube.CodeInvalid {
		t.Errorf("%s: %v, want Invalid", in, err)
		return
	}
	if e.Field != field {
		t.Errorf("%s: field %q, want %q", in, e.Field, field)
	}
	for part := range strings.SplitSeq(text, "|") {
		if strings.Contains(err.Error(), part) {
			return
		}
	}
	t.Errorf("%s: %q does not say %q", in, err, text)
}

func TestDefaultNetworkIsUsable(t *testing.T) {
	gateway, guest, err := cube.NetworkSpec{}.Addresses()
	if err != nil || gateway.String() != "169.254.0.21/30" || guest.String() != "169.254.0.22/30" {
		t.Errorf("addresses %v and %v, %v", gateway, guest, err)
	}
}

// TestAddressesAreHostsOfTheSubnet holds for every subnet that is accepted.
func TestAddressesAreHostsOfTheSubnet(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		addr := netip.AddrFrom4([4]byte(rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "address")))
		subnet := netip.PrefixFrom(addr, rapid.IntRange(0, 32).Draw(t, "bits")).Masked()
		spec := cube.NetworkSpec{CIDR: subnet.String()}
		gateway, guest, err := spec.Addresses()
		if (err == nil) != (spec.Validate() == nil) {
			t.Fatalf("%s: Addresses %v, Validate %v", subnet, err, spec.Validate())
		}
		if err != nil {
			return
		}
		if gateway == guest || gateway.Masked() != subnet || guest.Masked() != subnet {
			t.Fatalf("%s: gateway %s, guest %s", subnet, gateway, guest)
		}
		for _, a := range []netip.Addr{gateway.Addr(), guest.Addr()} {
			if a == subnet.Addr() || !subnet.Contains(a.Next()) {
				t.Fatalf("%s: %s is the subnet's own or its broadcast address", subnet, a)
			}
		}
	})
}

func TestParseMetadata(t *testing.T) {
	models := cube.HostMount{HostPath: "/data/models", ContainerPath: "/mnt/models"}
	readOnly := models
	readOnly.ReadOnly = true
	for _, tc := range []struct {
		in     string
		meta   map[string]string
		mounts []cube.HostMount
	}{
		{`{}`, map[string]string{}, nil},
		{`{"team":"a","empty":""}`, map[string]string{"team": "a", "empty": ""}, nil},
		{`{"host-mount":[]}`, map[string]string{}, []cube.HostMount{}},
		{`{"host-mount":[{"hostPath":"/data/models","containerPath":"/mnt/models"}]}`, map[string]string{}, []cube.HostMount{models}},
		{
			`{"host-mount":"[{\"hostPath\":\"/data/models\",\"containerPath\":\"/mnt/models\",\"readOnly\":true}]","k":"v"}`,
			map[string]string{"k": "v"},
			[]cube.HostMount{readOnly},
		},
	} {
		meta, mounts, err := cube.ParseMetadata([]byte(tc.in))
		if err != nil {
			t.Errorf("%s: %v", tc.in, err)
			continue
		}
		if diff := cmp.Diff(tc.meta, meta); diff != "" {
			t.Errorf("%s: metadata (-want +got):\n%s", tc.in, diff)
		}
		if diff := cmp.Diff(tc.mounts, mounts); diff != "" {
			t.Errorf("%s: mounts (-want +got):\n%s", tc.in, diff)
		}
	}
}

func TestParseMetadataRefuses(t *testing.T) {
	const mounts = "metadata.host-mount"
	for _, tc := range []struct{ in, field, text string }{
		{``, "metadata", "empty"},
		{`{`, "metadata", "EOF"},
		{`{} x`, "metadata", "after"},
		{`[]`, "metadata", "array"},
		{`"text"`, "metadata", "string"},
		{`{"k":1}`, "metadata.k", "string"},
		{`{"k":null}`, "metadata.k", "string"},
		{`{"k":{"a":"b"}}`, "metadata.k", "string"},
		{`{"host-mount":{}}`, mounts, "object"},
		{`{"host-mount":"not json"}`, mounts, "invalid character"},
		{`{"host-mount":""}`, mounts, "empty"},
		{`{"host-mount":[{"hostPath":"/a","containerPath":"/b","mode":"rw"}]}`, mounts, "mode"},
		{`{"host-mount":[{"containerPath":"/b"}]}`, mounts + "[0].hostPath", "required"},
		{`{"host-mount":[{"hostPath":"/a","containerPath":"/b"},{"hostPath":"/a"}]}`, mounts + "[1].containerPath", "required"},
		{`{"host-mount":[{"hostPath":"a","containerPath":"/b"}]}`, mounts + "[0].hostPath", "absolute"},
		{`{"host-mount":[{"hostPath":"/a/../etc","containerPath":"/b"}]}`, mounts + "[0].hostPath", "clean"},
		{`{"host-mount":[{"hostPath":"/a","containerPath":"/b/"}]}`, mounts + "[0].containerPath", "clean"},
		{`{"host-mount":[{"hostPath":"/a\u0000b","containerPath":"/b"}]}`, mounts + "[0].hostPath", "clean"},
		{`{"host-mount":[{"hostPath":"/a","containerPath":"/b"}] }x`, "metadata", "after"},
	} {
		_, _, err := cube.ParseMetadata([]byte(tc.in))
		wantInvalid(t, tc.in, err, tc.field, tc.text)
	}
}

func FuzzParseMetadata(f *testing.F) {
	f.Add([]byte(`{"host-mount":[{"hostPath":"/data/models","containerPath":"/mnt/models"}],"k":"v"}`))
	f.Add([]byte(`{"host-mount":"[]"}`))
	f.Add([]byte(`{"host-mount":null}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		meta, mounts, err := cube.ParseMetadata(b)
		if err != nil {
			if cube.CodeOf(err) != cube.CodeInvalid {
				t.Fatalf("%q: %v is not Invalid", b, err)
			}
			return
		}
		if _, ok := meta[cube.HostMountKey]; ok {
			t.Fatalf("%q: host mounts are left in the metadata", b)
		}
		for _, m := range mounts {
			if err := m.Validate("m"); err != nil {
				t.Fatalf("%q: accepted %v", b, err)
			}
		}
		again, err := json.Marshal(meta)
		if err != nil {
			t.Fatal(err)
		}
		back, _, err := cube.ParseMetadata(again)
		if err != nil || cmp.Diff(meta, back) != "" {
			t.Fatalf("%q: %v came back as %v, %v", b, meta, back, err)
		}
	})
}

func FuzzParseNetwork(f *testing.F) {
	f.Add([]byte(`{"cidr":"192.168.10.0/24"}`))
	f.Add([]byte(`{"cidr":"::ffff:10.0.0.0/120"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		spec, err := cube.ParseNetwork(b)
		if err != nil {
			if cube.CodeOf(err) != cube.CodeInvalid {
				t.Fatalf("%q: %v is not Invalid", b, err)
			}
			return
		}
		if _, _, err := spec.Addresses(); err != nil {
			t.Fatalf("%q: accepted, but %v", b, err)
		}
	})
}
