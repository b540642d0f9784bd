package server

import (
	"context"

	"github.com/cubesandbox/cubelet/api/cube/v1/cubev1connect"

	"connectrpc.com/connect"

	cube "github.com/cubesandbox/cubelet"
	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

// sandboxService implements cubev1connect.SandboxServiceHandler.
type sandboxService struct {
	cubev1connect.UnimplementedSandboxServiceHandler
	sandboxes cube.Sandboxes
}

func (s *sandboxService) CreateSandbox(ctx context.Context, req *connect.Request[cubev1.CreateSandboxRequest]) (*connect.Response[cubev1.CreateSandboxResponse], error) {
	spec, err := toSandboxSpec(req.Msg)
	if err != nil {
		return nil, err
	}
	sb, err := s.sandboxes.Create(ctx, spec)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&cubev1.CreateSandboxResponse{Sandbox: fromSandbox(sb), Timings: fromTimings(sb.Timings)}), nil
}

func (s *sandboxService) GetSandbox(ctx context.Context, req *connect.Request[cubev1.GetSandboxRequest]) (*connect.Response[cubev1.GetSandboxResponse], error) {
	var c check
	if c.ref("sandbox_id", req.Msg.GetSandboxId()); c.err != nil {
		return nil, c.err
	}
	sb, err := s.sandboxes.Get(ctx, req.Msg.GetSandboxId())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&cubev1.GetSandboxResponse{Sandbox: fromSandbox(sb)}), nil
}

func (s *sandboxService) ListSandbox(ctx context.Context, req *connect.Request[cubev1.ListSandboxRequest]) (*connect.Response[cubev1.ListSandboxResponse], error) {
	filter, err := toListFilter(req.Msg)
	if err != nil {
		return nil, err
	}
	page, err := s.sandboxes.List(ctx, filter)
	if err != nil {
		return nil, err
	}
	out := &cubev1.ListSandboxResponse{NextPageToken: page.NextPageToken, Total: count(page.Total)}
	for _, sb := range page.Sandboxes {
		out.Sandboxes = append(out.Sandboxes, fromSandbox(sb))
	}
	return connect.NewResponse(out), nil
}

func (s *sandboxService) DeleteSandbox(ctx context.Context, req *connect.Request[cubev1.DeleteSandboxRequest]) (*connect.Response[cubev1.DeleteSandboxResponse], error) {
	var c check
	if c.ref("sandbox_id", req.Msg.GetSandboxId()); c.err != nil {
		return nil, c.err
	}
	err := s.sandboxes.Delete(ctx, req.Msg.GetSandboxId())
	if err != nil && !(req.Msg.GetAllowMissing() && cube.IsNotFound(err)) {
		return nil, err
	}
	return connect.NewResponse(&cubev1.DeleteSandboxResponse{}), nil
}

func (s *sandboxService) GetSandboxLogs(ctx context.Context, req *connect.Request[cubev1.GetSandboxLogsRequest], stream *connect.ServerStream[cubev1.GetSandboxLogsResponse]) error {
	var c check
	if c.ref("sandbox_id", req.Msg.GetSandboxId()); c.err != nil {
		return c.err
	}
	o := cube.LogOptions{TailLines: int(req.Msg.GetTailLines()), Follow: req.Msg.GetFollow()}
	return s.sandboxes.Logs(ctx, req.Msg.GetSandboxId(), o, &logWriter{stream: stream})
}

// logWriter sends what is written in messages of bounded size.
type logWriter struct {
	stream *connect.ServerStream[cubev1.GetSandboxLogsResponse]
}

const logChunkBytes = 64 << 10

// Write implements io.Writer.
func (w *logWriter) Write(p []byte) (int, error) {
	for sent := 0; sent < len(p); {
		n := min(len(p)-sent, logChunkBytes)
		if err := w.stream.Send(&cubev1.GetSandboxLogsResponse{Data: p[sent : sent+n]}); err != nil {
			return sent, err
		}
		sent += n
	}
	return len(p), nil
}
