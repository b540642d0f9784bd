package server

import (
	"context"
	"log/slog"
	"net/http"

	"connectrpc.com/connect"
	"connectrpc.com/grpchealth"
	"connectrpc.com/grpcreflect"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/api/cube/v1/cubev1connect"
)

// maxMessageBytes bounds one request message; streams may hold any number of them.
const maxMessageBytes = 4 << 20

// Config is what a server needs. Every field is required.
type Config struct {
	Sandboxes cube.Sandboxes
	Templates cube.Templates
	Node      cube.Node
	// Health returns nil when the node can take work. It answers the health service.
	Health func(ctx context.Context) error
	Log    *slog.Logger
}

// New returns the handler of the whole API: the three services of cube.v1, health,
// reflection, and the guests' files below /guest/.
func New(cfg Config) http.Handler {
	opts := connect.WithHandlerOptions(
		connect.WithInterceptors(&interceptor{log: cfg.Log}),
		connect.WithReadMaxBytes(maxMessageBytes),
		connect.WithCodec(strictJSON{name: "json"}),
		connect.WithCodec(strictJSON{name: "json; charset=utf-8"}),
	)
	names := services()
	reflector := grpcreflect.NewStaticReflector(append(names, grpchealth.HealthV1ServiceName)...)

	mux := http.NewServeMux()
	mux.Handle(cubev1connect.NewSandboxServiceHandler(&sandboxService{sandboxes: cfg.Sandboxes}, opts))
	mux.Handle(cubev1connect.NewTemplateServiceHandler(&templateService{templates: cfg.Templates}, opts))
	mux.Handle(cubev1connect.NewNodeServiceHandler(&nodeService{node: cfg.Node}, opts))
	mux.Handle(grpchealth.NewHandler(&checker{services: names, health: cfg.Health}, opts))
	mux.Handle(grpcreflect.NewHandlerV1(reflector, opts))
	mux.Handle(grpcreflect.NewHandlerV1Alpha(reflector, opts))
	newGuestProxy(cfg).register(mux)
	return mux
}

func services() []string {
	return []string{
		cubev1connect.SandboxServiceName,
		cubev1connect.TemplateServiceName,
		cubev1connect.NodeServiceName,
	}
}

// checker answers the gRPC health protocol. All services of a node share one health.
type checker struct {
	services []string
	health   func(ctx context.Context) error
}

// Check implements grpchealth.Checker.
func (c *checker) Check(ctx context.Context, req *grpchealth.CheckRequest) (*grpchealth.CheckResponse, error) {
	if req.Service != "" && !contains(c.services, req.Service) {
		return nil, cube.Errorf(cube.CodeNotFound, "no service %q", req.Service)
	}
	if c.health(ctx) != nil {
		return &grpchealth.CheckResponse{Status: grpchealth.StatusNotServing}, nil
	}
	return &grpchealth.CheckResponse{Status: grpchealth.StatusServing}, nil
}

func contains(list []string, s string) bool {
	for _, v := range list {
		if v == s {
			return true
		}
	}
	return false
}
