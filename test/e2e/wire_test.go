package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
	"github.com/cubesandbox/cubelet/internal/testenv"
)

// testOverTheWire calls the node as programs other than cubecli do.
func testOverTheWire(t *testing.T, n *node) {
	fi, err := os.Stat(n.socket())
	if err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("socket mode = %v, %v; want 0600", fi.Mode(), err)
	}
	// JSON over HTTP/1.1, as curl sends it.
	hc := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", n.socket())
	}}}
	defer hc.CloseIdleConnections()
	post := func(path, body string) (int, string) {
		res, err := hc.Post("http://cubelet/"+path, "application/json", strings.NewReader(body))
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
	if code, body := post("cube.v1.NodeService/GetNodeStatus", "{}"); code != 200 || !strings.Contains(body, `"acceleratorReason"`) {
		t.Errorf("node status = %d %s", code, body)
	}
	if code, body := post("grpc.health.v1.Health/Check", "{}"); code != 200 || !strings.Contains(body, "SERVING") {
		t.Errorf("health = %d %s", code, body)
	}
	if code, body := post("cube.v1.SandboxService/GetSandbox", `{"sandboxId":"nothing"}`); code != 404 || !strings.Contains(body, "not_found") {
		t.Errorf("unknown sandbox = %d %s", code, body)
	}
	code, body := post("cube.v1.SandboxService/CreateSandbox", `{"templateId":"base","metadata":{"via":"json"}}`)
	if code != 200 {
		t.Fatalf("create = %d %s", code, body)
	}
	created := decode[struct {
		Sandbox struct{ ID string }
		Timings []struct{ Stage string }
	}](t, body)
	if len(created.Timings) == 0 {
		t.Errorf("no timings in %s", body)
	}
	if code, body := post("cube.v1.SandboxService/DeleteSandbox", `{"sandboxId":"`+created.Sandbox.ID+`"}`); code != 200 {
		t.Errorf("delete = %d %s", code, body)
	}
	if code, body := post("cube.v1.SandboxService/DeleteSandbox", `{"sandboxId":"`+created.Sandbox.ID+`","allowMissing":true}`); code != 200 {
		t.Errorf("delete what is gone = %d %s", code, body)
	}
	// A deadline that is too short ends the create and leaves nothing.
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Millisecond)
	defer cancel()
	_, err = n.sandboxes.CreateSandbox(ctx, req(&cubev1.CreateSandboxRequest{TemplateId: "base", Env: map[string]string{"A": "1"}}))
	var ce *connect.Error
	if !errors.As(err, &ce) || ce.Code() != connect.CodeDeadlineExceeded {
		t.Errorf("create with 60 ms to go = %v", err)
	}
	// The client heard of its own deadline; the node unwinds at the same time.
	testenv.Eventually(t, 30*time.Second, func() error {
		if ids := n.must("sandbox", "list", "-q"); ids != "" {
			return fmt.Errorf("%s is still there", ids)
		}
		return nil
	})
}
