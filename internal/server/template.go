package server

import (
	"context"

	"connectrpc.com/connect"

	cube "github.com/cubesandbox/cubelet"
	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

// templateService implements cubev1connect.TemplateServiceHandler.
type templateService struct{ templates cube.Templates }

// progressBuffer is how many progress reports wait for a slow client before some are
// dropped: a client that does not read must not hold up a build.
const progressBuffer = 64

func (s *templateService) CreateTemplate(ctx context.Context, req *connect.Request[cubev1.CreateTemplateRequest], stream *connect.ServerStream[cubev1.CreateTemplateResponse]) error {
	spec, err := toTemplateSpec(req.Msg)
	if err != nil {
		return err
	}
	reports := make(chan cube.TemplateProgress, progressBuffer)
	sent := make(chan error, 1)
	go func() { sent <- sendProgress(stream, reports) }()
	tpl, err := s.templates.Create(ctx, spec, func(p cube.TemplateProgress) {
		select {
		case reports <- p:
		default:
		}
	})
	close(reports)
	sendErr := <-sent
	if err != nil {
		return err
	}
	if sendErr != nil {
		return sendErr
	}
	return stream.Send(&cubev1.CreateTemplateResponse{Event: &cubev1.CreateTemplateResponse_Template{Template: fromTemplate(tpl)}})
}

// sendProgress sends the reports until the channel is closed. After an error it only
// drains it.
func sendProgress(stream *connect.ServerStream[cubev1.CreateTemplateResponse], reports <-chan cube.TemplateProgress) error {
	var failed error
	for p := range reports {
		if failed == nil {
			failed = stream.Send(fromProgress(p))
		}
	}
	return failed
}

func (s *templateService) GetTemplate(ctx context.Context, req *connect.Request[cubev1.GetTemplateRequest]) (*connect.Response[cubev1.GetTemplateResponse], error) {
	var c check
	if c.ref("template_id", req.Msg.GetTemplateId()); c.err != nil {
		return nil, c.err
	}
	tpl, err := s.templates.Get(ctx, req.Msg.GetTemplateId())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&cubev1.GetTemplateResponse{Template: fromTemplate(tpl)}), nil
}

func (s *templateService) ListTemplate(ctx context.Context, _ *connect.Request[cubev1.ListTemplateRequest]) (*connect.Response[cubev1.ListTemplateResponse], error) {
	list, err := s.templates.List(ctx)
	if err != nil {
		return nil, err
	}
	out := &cubev1.ListTemplateResponse{}
	for _, tpl := range list {
		out.Templates = append(out.Templates, fromTemplate(tpl))
	}
	return connect.NewResponse(out), nil
}

func (s *templateService) DeleteTemplate(ctx context.Context, req *connect.Request[cubev1.DeleteTemplateRequest]) (*connect.Response[cubev1.DeleteTemplateResponse], error) {
	var c check
	if c.ref("template_id", req.Msg.GetTemplateId()); c.err != nil {
		return nil, c.err
	}
	err := s.templates.Delete(ctx, req.Msg.GetTemplateId(), req.Msg.GetForce())
	if err != nil && !(req.Msg.GetAllowMissing() && cube.IsNotFound(err)) {
		return nil, err
	}
	return connect.NewResponse(&cubev1.DeleteTemplateResponse{}), nil
}
