package template

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/durable"
	"github.com/cubesandbox/cubelet/internal/tplimage"
)

// Names of a template's files. A directory without a manifest is no template.
const (
	manifestName = "manifest.json"
	rootName     = "root.erofs"
	baseName     = "base.layer"
	sizesName    = "sizes"
	memoryName   = "memory"
	stateName    = "state"
	layerName    = "layer"
	consoleName  = "console.log"

	trashPrefix = ".trash-"
	buildPrefix = ".build-"

	manifestVersion = 1
)

// manifest is what a template's directory says of it.
type manifest struct {
	Version  int               `json:"version"`
	Template cube.Template     `json:"template"` // without Names and Sizes
	Env      map[string]string `json:"env,omitempty"`
	// Entry is what the records must hold of it; a daemon that finds the template
	// unknown to them completes its commit.
	Entry Entry `json:"entry"`
}

// sizeManifest describes one memory image.
type sizeManifest struct {
	Version     int              `json:"version"`
	Resources   cube.Resources   `json:"resources"`
	Machine     cube.MachineInfo `json:"machine"`
	CreatedAt   time.Time        `json:"createdAt"`
	MemoryBytes int64            `json:"memoryBytes"`
	StateBytes  int64            `json:"stateBytes"`
	LayerBytes  int64            `json:"layerBytes"`
}

func sizeName(r cube.Resources) string { return fmt.Sprintf("%dx%d", r.VCPUs, r.MemoryMiB) }

// dirs are the paths of one template.
type dirs struct{ root string }

func (d dirs) manifest() string             { return filepath.Join(d.root, manifestName) }
func (d dirs) rootDisk() string             { return filepath.Join(d.root, rootName) }
func (d dirs) base() string                 { return filepath.Join(d.root, baseName) }
func (d dirs) sizes() string                { return filepath.Join(d.root, sizesName) }
func (d dirs) size(r cube.Resources) string { return filepath.Join(d.sizes(), sizeName(r)) }
func (d dirs) work(r cube.Resources) string {
	return filepath.Join(d.sizes(), buildPrefix+sizeName(r))
}

func writeManifest(path string, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("encode manifest: %w", err)
	}
	return durable.WriteFile(path, append(b, '\n'), 0o444)
}

// readManifest reads the manifest of the template whose directory it is.
func readManifest(d dirs) (manifest, error) {
	var m manifest
	b, err := os.ReadFile(d.manifest())
	if err != nil {
		return m, err
	}
	if err := json.Unmarshal(b, &m); err != nil {
		return m, fmt.Errorf("manifest: %w", err)
	}
	switch {
	case m.Version != manifestVersion:
		return m, fmt.Errorf("manifest of version %d, this build knows version %d", m.Version, manifestVersion)
	case m.Template.ID != filepath.Base(d.root):
		return m, fmt.Errorf("manifest of template %q", m.Template.ID)
	case m.Entry.ID != m.Template.ID:
		return m, fmt.Errorf("manifest with the records of template %q", m.Entry.ID)
	}
	return m, nil
}

// readSize reads and checks the memory image in dir: a file that is shorter than it was
// would let a guest run into nothing.
func readSize(dir string) (sizeManifest, error) {
	var m sizeManifest
	b, err := os.ReadFile(filepath.Join(dir, manifestName))
	if err != nil {
		return m, err
	}
	if err := json.Unmarshal(b, &m); err != nil {
		return m, fmt.Errorf("manifest: %w", err)
	}
	if m.Version != manifestVersion || sizeName(m.Resources) != filepath.Base(dir) {
		return m, fmt.Errorf("manifest of version %d for %s", m.Version, sizeName(m.Resources))
	}
	for name, want := range map[string]int64{memoryName: m.MemoryBytes, stateName: m.StateBytes, layerName: m.LayerBytes} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			return m, err
		}
		if info.Size() != want || want == 0 {
			return m, fmt.Errorf("%s has %d bytes instead of %d", name, info.Size(), want)
		}
	}
	return m, nil
}

// readSizes returns the usable memory images of a template and removes what a crash left
// and what is damaged: they can be made again.
func readSizes(d dirs, warn func(name string, err error)) (map[string]sizeManifest, error) {
	entries, err := os.ReadDir(d.sizes())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	sizes := map[string]sizeManifest{}
	for _, e := range entries {
		path := filepath.Join(d.sizes(), e.Name())
		if !strings.HasPrefix(e.Name(), ".") {
			m, err := readSize(path)
			if err == nil {
				sizes[e.Name()] = m
				continue
			}
			warn(e.Name(), err)
		}
		if err := os.RemoveAll(path); err != nil {
			return nil, err
		}
	}
	return sizes, nil
}

// environment is the image's environment with the template's laid over it.
func (m *manifest) environment() map[string]string {
	env := map[string]string{}
	for _, kv := range m.Template.Config.Env {
		if k, v, ok := strings.Cut(kv, "="); ok {
			env[k] = v
		}
	}
	maps.Copy(env, m.Env)
	return env
}

// image is what a sandbox of that size needs.
func (m *manifest) image(d dirs, r cube.Resources) tplimage.Image {
	dir := d.size(r)
	return tplimage.Image{
		TemplateID: m.Template.ID,
		Resources:  r,
		RootPath:   d.rootDisk(),
		LayerPath:  filepath.Join(dir, layerName),
		MemoryPath: filepath.Join(dir, memoryName),
		StatePath:  filepath.Join(dir, stateName),
		MAC:        guestMAC,
		Config:     m.Template.Config,
		Env:        m.environment(),
	}
}
