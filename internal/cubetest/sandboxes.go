package cubetest

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	cube "github.com/cubesandbox/cubelet"
)

// sandboxes implements cube.Sandboxes.
type sandboxes struct{ n *Node }

// Create implements cube.Sandboxes. IDs count up: s00001x, s00002x and so on.
func (s sandboxes) Create(ctx context.Context, spec cube.SandboxSpec) (cube.Sandbox, error) {
	if err := s.n.begin(ctx, "create"); err != nil {
		return cube.Sandbox{}, err
	}
	if len(spec.HostMounts) > 0 {
		e := cube.Errorf(cube.CodeUnimplemented, "host mounts are not built yet")
		e.Op, e.Field = "create sandbox", "metadata."+cube.HostMountKey
		return cube.Sandbox{}, e.WithHint("copy the files with `cubecli sandbox cp`")
	}
	s.n.mu.Lock()
	defer s.n.mu.Unlock()
	request, err := json.Marshal(spec)
	if err != nil {
		return cube.Sandbox{}, err
	}
	if old, ok := s.n.keys[spec.IdempotencyKey]; ok && spec.IdempotencyKey != "" {
		if old.request != string(request) {
			return cube.Sandbox{}, cube.Errorf(cube.CodeAlreadyExists, "the idempotency key was used for another request")
		}
		return s.n.sandboxes[old.id].Sandbox, nil
	}
	tpl, err := s.n.findTemplate(spec.TemplateRef)
	if err != nil {
		return cube.Sandbox{}, err
	}
	sb := s.n.makeSandbox(tpl, spec)
	s.n.keys[spec.IdempotencyKey] = keyed{string(request), sb.ID}
	return sb.Sandbox, nil
}

func (n *Node) makeSandbox(tpl cube.Template, spec cube.SandboxSpec) *sandbox {
	n.made++
	_, guest, _ := spec.Network.Addresses()
	sb := &sandbox{
		spec:  spec,
		token: "token-" + strconv.Itoa(n.made),
		Sandbox: cube.Sandbox{
			ID:         fmt.Sprintf("s%05dx", n.made),
			Phase:      cube.PhaseRunning,
			TemplateID: tpl.ID,
			Resources: cube.Resources{
				VCPUs:     cmp.Or(spec.Resources.VCPUs, tpl.Resources.VCPUs),
				MemoryMiB: cmp.Or(spec.Resources.MemoryMiB, tpl.Resources.MemoryMiB),
			},
			Metadata:     spec.Metadata,
			Network:      spec.Network,
			CreatedAt:    Epoch().Add(time.Duration(n.made) * time.Second),
			GuestAddress: guest.String(),
			PID:          1000 + n.made,
			Timings: []cube.StageTiming{
				{Stage: "claim", Duration: 2 * time.Millisecond},
				{Stage: "launch", Start: 2 * time.Millisecond, Duration: 40 * time.Millisecond},
			},
		},
	}
	if spec.Timeout > 0 {
		sb.ExpiresAt = sb.CreatedAt.Add(spec.Timeout)
	}
	n.mkdir(n.GuestDir(sb.ID))
	n.sandboxes[sb.ID] = sb
	return sb
}

// Get implements cube.Sandboxes.
func (s sandboxes) Get(ctx context.Context, ref string) (cube.Sandbox, error) {
	sb, err := s.get(ctx, "get", ref)
	if err != nil {
		return cube.Sandbox{}, err
	}
	return sb.Sandbox, nil
}

func (s sandboxes) get(ctx context.Context, call, ref string) (*sandbox, error) {
	if err := s.n.begin(ctx, call); err != nil {
		return nil, err
	}
	s.n.mu.Lock()
	defer s.n.mu.Unlock()
	return s.n.findSandbox(ref)
}

// List implements cube.Sandboxes. A page token is the last ID of the page before.
func (s sandboxes) List(ctx context.Context, f cube.ListFilter) (cube.SandboxPage, error) {
	if err := s.n.begin(ctx, "list"); err != nil {
		return cube.SandboxPage{}, err
	}
	s.n.mu.Lock()
	defer s.n.mu.Unlock()
	templateID := ""
	if f.TemplateRef != "" {
		tpl, err := s.n.findTemplate(f.TemplateRef)
		if err != nil {
			return cube.SandboxPage{}, err
		}
		templateID = tpl.ID
	}
	var all []cube.Sandbox
	for _, sb := range s.n.sandboxes {
		if matches(sb.Sandbox, f, templateID) {
			all = append(all, sb.Sandbox)
		}
	}
	slices.SortFunc(all, func(a, b cube.Sandbox) int { return cmp.Compare(a.ID, b.ID) })
	page := cube.SandboxPage{Total: len(all)}
	size := cmp.Or(f.PageSize, 100)
	for _, sb := range all {
		if sb.ID <= f.PageToken {
			continue
		}
		if len(page.Sandboxes) == size {
			page.NextPageToken = page.Sandboxes[size-1].ID
			break
		}
		page.Sandboxes = append(page.Sandboxes, sb)
	}
	return page, nil
}

func matches(sb cube.Sandbox, f cube.ListFilter, templateID string) bool {
	if len(f.Phases) > 0 && !slices.Contains(f.Phases, sb.Phase) {
		return false
	}
	if templateID != "" && sb.TemplateID != templateID {
		return false
	}
	for k, v := range f.Metadata {
		if sb.Metadata[k] != v {
			return false
		}
	}
	return true
}

// Delete implements cube.Sandboxes.
func (s sandboxes) Delete(ctx context.Context, ref string) error {
	sb, err := s.get(ctx, "delete", ref)
	if err != nil {
		return err
	}
	s.n.mu.Lock()
	defer s.n.mu.Unlock()
	delete(s.n.sandboxes, sb.ID)
	return os.RemoveAll(s.n.GuestDir(sb.ID))
}

// Logs implements cube.Sandboxes.
func (s sandboxes) Logs(ctx context.Context, ref string, o cube.LogOptions, w io.Writer) error {
	if _, err := s.get(ctx, "logs", ref); err != nil {
		return err
	}
	s.n.mu.Lock()
	text := s.n.logs
	s.n.mu.Unlock()
	if lines := strings.SplitAfter(text, "\n"); o.TailLines > 0 && len(lines) > o.TailLines {
		text = strings.Join(lines[len(lines)-o.TailLines-1:], "")
	}
	if _, err := io.WriteString(w, text); err != nil || !o.Follow {
		return err
	}
	<-ctx.Done()
	return nil
}

// DialGuest implements cube.Sandboxes. Only the agent's port answers.
func (s sandboxes) DialGuest(ctx context.Context, ref string, port int) (net.Conn, string, error) {
	sb, err := s.get(ctx, "dial", ref)
	if err != nil {
		return nil, "", err
	}
	if port != cube.AgentPort {
		return nil, "", cube.Errorf(cube.CodeUnavailable, "port %d refused the connection", port)
	}
	conn, err := s.n.guest.dial(ctx, sb)
	return conn, sb.token, err
}
