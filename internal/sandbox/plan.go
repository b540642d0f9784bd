package sandbox

import (
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/vmm"
)

// NodeFacts are the properties of the node that a plan depends on.
type NodeFacts struct {
	SandboxesDir string // each sandbox has a directory of its ID below it
	Nameservers  []string
	Limits       func(cube.Resources) vmm.Limits // must be pure
}

// identity is what no two sandboxes share; it is drawn before the plan is made.
type identity struct {
	ID, MachineID, AccessToken string
}

// Plan fixes everything that a sandbox will consist of: names, paths, addresses.
type Plan struct {
	Image        Image       `json:"image"`
	Dir          string      `json:"dir"`
	LayerPath    string      `json:"layerPath"`
	Machine      vmm.Machine `json:"machine"`
	Limits       vmm.Limits  `json:"limits"`
	GuestAddress string      `json:"guestAddress"` // with prefix length
	Guest        GuestPlan   `json:"guest"`
}

// GuestPlan is the part of the plan that the guest agent is told. What must be fresh
// at each restore (time, entropy) is not in it.
type GuestPlan struct {
	Hostname    string            `json:"hostname"`
	MachineID   string            `json:"machineId"`
	AccessToken string            `json:"accessToken"`
	Env         map[string]string `json:"env,omitempty"`
	// Address and Gateway are empty when the guest keeps the template's.
	Address     string   `json:"address,omitempty"`
	Gateway     string   `json:"gateway,omitempty"`
	Nameservers []string `json:"nameservers,omitempty"`
}

// plan decides what the sandbox will be. It is pure: the same arguments give the same
// plan. The spec is valid.
func plan(spec cube.SandboxSpec, who identity, img Image, node NodeFacts) (Plan, error) {
	gateway, guest, err := spec.Network.Addresses()
	if err != nil {
		return Plan{}, err
	}
	dir := filepath.Join(node.SandboxesDir, who.ID)
	root, layer := filepath.Join(dir, "root"), (&Plan{Dir: dir}).layer(0)
	p := Plan{
		Image:        img,
		Dir:          dir,
		LayerPath:    layer,
		Limits:       node.Limits(img.Resources),
		GuestAddress: guest.String(),
		Machine: vmm.Machine{
			VCPUs:       img.Resources.VCPUs,
			MemoryMiB:   img.Resources.MemoryMiB,
			MemoryPath:  img.MemoryPath,
			StatePath:   img.StatePath,
			Disks:       []vmm.Disk{{Path: root, ReadOnly: true}, {Path: layer}},
			MAC:         img.MAC,
			ConsolePath: filepath.Join(dir, "console.log"),
		},
		Guest: GuestPlan{
			Hostname:    who.ID,
			MachineID:   who.MachineID,
			AccessToken: who.AccessToken,
			Env:         mergeEnv(img.Env, spec.Env),
			Nameservers: node.Nameservers,
		},
	}
	// A frozen guest has the address of the sandbox that it was.
	if spec.Network.CIDR != "" || img.SnapshotID != "" {
		p.Guest.Address, p.Guest.Gateway = guest.String(), gateway.Addr().String()
	}
	return p, nil
}

// next returns the plan of the generation after this one: files of the same directory with
// its number. What it restores is still to be set.
func (p *Plan) next(generation int) Plan {
	n := *p
	n.LayerPath = p.layer(generation)
	n.Machine.Disks = slices.Clone(p.Machine.Disks)
	n.Machine.Disks[layerDisk].Path = n.LayerPath
	return n
}

// layer names a generation's writable layer.
func (p *Plan) layer(generation int) string {
	if generation == 0 {
		return filepath.Join(p.Dir, "layer")
	}
	return filepath.Join(p.Dir, "layer."+strconv.Itoa(generation))
}

// saved names the memory image and device state that a generation is restored from.
func (p *Plan) saved(generation int) (memory, state string) {
	suffix := "." + strconv.Itoa(generation)
	return filepath.Join(p.Dir, "memory"+suffix), filepath.Join(p.Dir, "state"+suffix)
}

// own lists those files of the plan's machine that lie in the sandbox's directory and are
// of its generation alone.
func (p *Plan) own() []string {
	files := []string{p.LayerPath}
	for _, path := range []string{p.Machine.MemoryPath, p.Machine.StatePath} {
		if filepath.Dir(path) == p.Dir {
			files = append(files, path)
		}
	}
	return files
}

// layerDisk is the writable layer's place among the machine's disks; the root disk's is 0.
const layerDisk = 1

// mergeEnv lays the sandbox's variables over the template's.
func mergeEnv(template, sandbox map[string]string) map[string]string {
	if len(template)+len(sandbox) == 0 {
		return nil
	}
	env := make(map[string]string, len(template)+len(sandbox))
	maps.Copy(env, template)
	maps.Copy(env, sandbox)
	return env
}

// init completes what the agent is told with what must be fresh.
func (p *Plan) init(id string, now time.Time, entropy []byte) GuestInit {
	cfg := p.Image.Config
	return GuestInit{
		SandboxID:   id,
		TemplateID:  p.Image.TemplateID,
		Hostname:    p.Guest.Hostname,
		MachineID:   p.Guest.MachineID,
		AccessToken: p.Guest.AccessToken,
		// What an agent that was frozen expects; it accepts its own as well.
		PresentedToken: p.Image.GuestToken,
		Entropy:        entropy,
		Time:           now,
		Env:            p.Guest.Env,
		User:           cfg.User,
		Workdir:        cfg.WorkingDir,
		Address:        p.Guest.Address,
		Gateway:        p.Guest.Gateway,
		Nameservers:    p.Guest.Nameservers,
		Entrypoint:     cfg.Entrypoint,
		Cmd:            cfg.Cmd,
	}
}
