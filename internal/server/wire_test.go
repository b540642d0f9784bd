package server

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	reflectpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	grpcstatus "google.golang.org/grpc/status"

	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
	"github.com/cubesandbox/cubelet/api/cube/v1/cubev1connect"
)

func newSandboxes(r *rig, opts ...connect.ClientOption) cubev1connect.SandboxServiceClient {
	return cubev1connect.NewSandboxServiceClient(r.http, base, opts...)
}

// post sends plain JSON as curl would.
func (r *rig) post(t *testing.T, procedure, body string) (int, string) {
	t.Helper()
	res, err := r.http1.Post(base+procedure, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, string(b)
}

func TestPlainJSONOverHTTP1(t *testing.T) {
	r := newRig(t)
	code, body := r.post(t, "/cube.v1.SandboxService/CreateSandbox", `{"templateId":"base","timeout":"60s"}`)
	if code != http.StatusOK || !strings.Contains(body, `"s00001x"`) {
		t.Fatalf("%d %s", code, body)
	}
	for name, tt := range map[string]struct {
		body string
		code int
		text []string
	}{
		"unknown field": {`{"templateId":"base","timeuot":"60s"}`, 400, []string{"invalid_argument", "timeuot"}},
		"no JSON":       {`{"templateId":`, 400, []string{"invalid_argument"}},
		"empty":         {``, 400, []string{"invalid_argument", "an empty request is {}"}},
		"invalid":       {`{}`, 400, []string{"template_id: is required", "INVALID_ARGUMENT"}},
		"not found":     {`{"templateId":"nope"}`, 404, []string{"not_found", "template nope not found", "cubecli template list"}},
	} {
		t.Run(name, func(t *testing.T) {
			code, body := r.post(t, "/cube.v1.SandboxService/CreateSandbox", tt.body)
			if code != tt.code {
				t.Errorf("%d %s", code, body)
			}
			for _, w := range tt.text {
				if !strings.Contains(body, w) {
					t.Errorf("no %q in %s", w, body)
				}
			}
		})
	}
}

func TestGRPCClientsOfGoogle(t *testing.T) {
	r := newRig(t)
	conn, err := grpc.NewClient("passthrough:cubelet", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", r.socket)
		}))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx := t.Context()

	var created cubev1.CreateSandboxResponse
	if err := conn.Invoke(ctx, cubev1connect.SandboxServiceCreateSandboxProcedure, &cubev1.CreateSandboxRequest{TemplateId: "base"}, &created); err != nil {
		t.Fatal(err)
	}
	err = conn.Invoke(ctx, cubev1connect.SandboxServiceGetSandboxProcedure, &cubev1.GetSandboxRequest{SandboxId: "nope"}, &cubev1.GetSandboxResponse{})
	st := grpcstatus.Convert(err)
	if st.Code() != codes.NotFound || len(st.Details()) != 1 {
		t.Fatalf("status %v", st)
	}
	if d, ok := st.Details()[0].(*cubev1.ErrorDetail); !ok || d.GetReason() != "NOT_FOUND" || d.GetId() != "nope" {
		t.Errorf("detail %v", st.Details()[0])
	}

	t.Run("exec", func(t *testing.T) {
		stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, cubev1connect.SandboxServiceExecSandboxProcedure)
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.SendMsg(startOf(created.GetSandbox().GetId(), "sh", "-c", "echo hi; exit 4")); err != nil {
			t.Fatal(err)
		}
		var out string
		for {
			var m cubev1.ExecSandboxResponse
			if err := stream.RecvMsg(&m); errors.Is(err, io.EOF) {
				t.Fatal("no exit")
			} else if err != nil {
				t.Fatal(err)
			}
			out += string(m.GetStdout())
			if e := m.GetExited(); e != nil {
				if e.GetExitCode() != 4 || out != "hi\n" {
					t.Errorf("exit %v, output %q", e, out)
				}
				return
			}
		}
	})
	t.Run("health", func(t *testing.T) {
		client := healthpb.NewHealthClient(conn)
		check := func(service string) healthpb.HealthCheckResponse_ServingStatus {
			res, err := client.Check(ctx, &healthpb.HealthCheckRequest{Service: service})
			if err != nil {
				t.Fatal(err)
			}
			return res.GetStatus()
		}
		if s := check("cube.v1.SandboxService"); s != healthpb.HealthCheckResponse_SERVING {
			t.Error(s)
		}
		r.health = errors.New("sick")
		if s := check(""); s != healthpb.HealthCheckResponse_NOT_SERVING {
			t.Error(s)
		}
		if _, err := client.Check(ctx, &healthpb.HealthCheckRequest{Service: "no.such"}); grpcstatus.Code(err) != codes.NotFound {
			t.Error(err)
		}
	})
	t.Run("reflection", func(t *testing.T) {
		stream, err := reflectpb.NewServerReflectionClient(conn).ServerReflectionInfo(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.Send(&reflectpb.ServerReflectionRequest{MessageRequest: &reflectpb.ServerReflectionRequest_ListServices{}}); err != nil {
			t.Fatal(err)
		}
		res, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, s := range res.GetListServicesResponse().GetService() {
			names = append(names, s.GetName())
		}
		for _, w := range append(services(), "grpc.health.v1.Health") {
			if !contains(names, w) {
				t.Errorf("no %s in %v", w, names)
			}
		}
	})
}

func startOf(id string, args ...string) *cubev1.ExecSandboxRequest {
	return &cubev1.ExecSandboxRequest{Request: &cubev1.ExecSandboxRequest_Start{Start: &cubev1.ExecStart{SandboxId: id, Args: args}}}
}
