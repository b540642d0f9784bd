package server

import (
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	cube "github.com/cubesandbox/cubelet"
	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

// seed adds messages in the wire format, from which the fuzzer departs.
func seed(f *testing.F, messages ...proto.Message) {
	for _, m := range messages {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
}

// refusal checks that an error of converting is the caller's and says where.
func refusal(t *testing.T, err error) bool {
	t.Helper()
	if err == nil {
		return false
	}
	st := status(t.Context(), err)
	if cube.CodeOf(err) != cube.CodeInvalid || detailOf(st).GetField() == "" {
		t.Errorf("error %v", err)
	}
	return true
}

func FuzzSandboxRequest(f *testing.F) {
	seed(f, &cubev1.CreateSandboxRequest{
		TemplateId: "base", Env: map[string]string{"A": "1"}, Network: &cubev1.NetworkSpec{Cidr: "10.0.0.0/24"},
		Metadata:   map[string]string{"host-mount": `[{"hostPath":"/a","containerPath":"/b"}]`},
		HostMounts: []*cubev1.HostMount{{HostPath: "/a", ContainerPath: "/b"}},
	}, &cubev1.CreateSandboxRequest{})
	f.Fuzz(func(t *testing.T, b []byte) {
		var req cubev1.CreateSandboxRequest
		if proto.Unmarshal(b, &req) != nil {
			return
		}
		spec, err := toSandboxSpec(&req)
		if refusal(t, err) {
			return
		}
		if spec.TemplateRef == "" || spec.Timeout < 0 || spec.Network.Validate() != nil || len(spec.IdempotencyKey) > 128 {
			t.Errorf("spec %+v", spec)
		}
		if _, ok := spec.Metadata[cube.HostMountKey]; ok {
			t.Error("the host mounts are still in the metadata")
		}
		for _, m := range spec.HostMounts {
			if err := m.Validate("m"); err != nil {
				t.Error(err)
			}
		}
	})
}

func FuzzTemplateRequest(f *testing.F) {
	seed(f, &cubev1.CreateTemplateRequest{
		Id: "tpl-abcde", Source: &cubev1.CreateTemplateRequest_ArchivePath{ArchivePath: "/a"}, Ready: &cubev1.ReadySpec{Port: 80},
	}, &cubev1.CreateTemplateRequest{})
	f.Fuzz(func(t *testing.T, b []byte) {
		var req cubev1.CreateTemplateRequest
		if proto.Unmarshal(b, &req) != nil {
			return
		}
		spec, err := toTemplateSpec(&req)
		if refusal(t, err) {
			return
		}
		if (spec.Image == "") == (spec.ArchivePath == "") || spec.Ready.Port < 0 || spec.Ready.Port > 65535 || spec.Ready.Timeout < 0 {
			t.Errorf("spec %+v", spec)
		}
	})
}

func FuzzListRequest(f *testing.F) {
	seed(f, &cubev1.ListSandboxRequest{PageSize: 1, Phases: []cubev1.Phase{1, 9}, Metadata: map[string]string{"a": "b"}})
	f.Fuzz(func(t *testing.T, b []byte) {
		var req cubev1.ListSandboxRequest
		if proto.Unmarshal(b, &req) != nil {
			return
		}
		filter, err := toListFilter(&req)
		if refusal(t, err) {
			return
		}
		for _, p := range filter.Phases {
			_ = p.String() // panics on what is no phase
		}
		if filter.PageSize < 0 || filter.PageSize > maxPageSize {
			t.Errorf("page size %d", filter.PageSize)
		}
	})
}

func FuzzExecMessages(f *testing.F) {
	seed(f, startOf("s1", "echo", "hi"), sig(9), stdin([]byte("x")), closeStdin())
	f.Fuzz(func(t *testing.T, b []byte) {
		var req cubev1.ExecSandboxRequest
		if proto.Unmarshal(b, &req) != nil {
			return
		}
		spec, err := toExecSpec(req.GetStart())
		if refusal(t, err) {
			return
		}
		if len(spec.Args) > 0 && spec.Args[0] == "" || strings.Contains(strings.Join(spec.Args, " "), "\x00") {
			t.Errorf("args %q", spec.Args)
		}
		if spec.TTY != nil && (spec.TTY.Cols == 0 || spec.TTY.Rows > maxTerminal) {
			t.Errorf("terminal %+v", spec.TTY)
		}
	})
}

func FuzzGuestPath(f *testing.F) {
	f.Add("/guest/s1/files", "path=/x")
	f.Add("/guest/s1/filesystem.Filesystem/Stat", "")
	f.Add("/guest/s1/filesystem.Filesystem/..%2f..%2finit", "a#b")
	f.Fuzz(func(t *testing.T, path, query string) {
		req := httptest.NewRequest("POST", "http://x/", nil)
		req.URL = &url.URL{Path: path, RawQuery: query}
		req.SetPathValue("method", path)
		u, err := guestPath(req)
		if err != nil {
			return
		}
		if u.Host != "guest" || u.Path != "/files" && !strings.HasPrefix(u.Path, "/filesystem.Filesystem/") || strings.Contains(u.Path, "..") {
			t.Errorf("%s", u)
		}
	})
}
