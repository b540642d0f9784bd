package server

import (
	"context"

	"github.com/cubesandbox/cubelet/api/cube/v1/cubev1connect"

	"connectrpc.com/connect"

	cube "github.com/cubesandbox/cubelet"
	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

// nodeService implements cubev1connect.NodeServiceHandler.
type nodeService struct {
	cubev1connect.UnimplementedNodeServiceHandler
	node cube.Node
}

func (s *nodeService) GetNodeStatus(ctx context.Context, _ *connect.Request[cubev1.GetNodeStatusRequest]) (*connect.Response[cubev1.GetNodeStatusResponse], error) {
	st, err := s.node.Status(ctx)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&cubev1.GetNodeStatusResponse{Status: fromNodeStatus(st)}), nil
}

func (s *nodeService) GetVersion(context.Context, *connect.Request[cubev1.GetVersionRequest]) (*connect.Response[cubev1.GetVersionResponse], error) {
	return connect.NewResponse(&cubev1.GetVersionResponse{Version: fromVersion(s.node.Version())}), nil
}

func (s *nodeService) CheckNode(ctx context.Context, _ *connect.Request[cubev1.CheckNodeRequest]) (*connect.Response[cubev1.CheckNodeResponse], error) {
	findings, err := s.node.Check(ctx)
	if err != nil {
		return nil, err
	}
	res := &cubev1.CheckNodeResponse{}
	for _, f := range findings {
		res.Findings = append(res.Findings, &cubev1.Finding{Part: f.Part, Object: f.Object, Detail: f.Detail})
	}
	return connect.NewResponse(res), nil
}
