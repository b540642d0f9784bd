package daemon

import (
	"context"
	"net"
	"net/http"

	"github.com/cubesandbox/cubelet/api/cube/v1/cubev1connect"
)

// nodeClient speaks to a node's unix socket.
func nodeClient(path string) cubev1connect.NodeServiceClient {
	hc := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}}}
	return cubev1connect.NewNodeServiceClient(hc, "http://cubelet")
}
