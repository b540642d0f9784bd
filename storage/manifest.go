package storage

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/tplimage"
)

// Names of the files in a snapshot's directory.
const (
	rootFile     = "root"   // EROFS root disk, a hard link
	layerFile    = "layer"  // writable layer
	memoryFile   = "memory" // complete memory image
	stateFile    = "state"  // QEMU's device state
	manifestFile = "manifest.json"
)

const manifestVersion = 1

// manifest describes a snapshot completely. It is the last file to be written.
type manifest struct {
	Version  int            `json:"version"`
	Snapshot cube.Snapshot  `json:"snapshot"`
	Image    tplimage.Image `json:"image"` // without paths
}

// seal makes the files of the directory durable and then the manifest.
func (m *manifest) seal(ctx context.Context, p *Pool, dir string) error {
	files := []string{filepath.Join(dir, rootFile), filepath.Join(dir, layerFile), filepath.Join(dir, memoryFile), filepath.Join(dir, stateFile)}
	for _, path := range files[2:] {
		// The VMM's user opens the memory image by a path of its own.
		if err := os.Chmod(path, 0o444); err != nil {
			return err
		}
	}
	if err := p.Sync(ctx, files...); err != nil {
		return err
	}
	m.Image.RootPath, m.Image.LayerPath, m.Image.MemoryPath, m.Image.StatePath = "", "", "", ""
	data, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return cube.Errorf(cube.CodeInternal, "encode manifest: %w", err)
	}
	return p.fs.WriteFile(filepath.Join(dir, manifestFile), append(data, '\n'), 0o600)
}

// image returns what a sandbox needs of the snapshot in the directory.
func (m *manifest) image(dir string) tplimage.Image {
	img := m.Image
	img.RootPath, img.LayerPath = filepath.Join(dir, rootFile), filepath.Join(dir, layerFile)
	img.MemoryPath, img.StatePath = filepath.Join(dir, memoryFile), filepath.Join(dir, stateFile)
	return img
}

// readManifest reads a manifest and looks that its files are there.
func readManifest(dir string) (m manifest, err error) {
	data, err := os.ReadFile(filepath.Join(dir, manifestFile))
	if err != nil {
		return m, err
	}
	if err := json.Unmarshal(data, &m); err != nil {
		return m, fmt.Errorf("read manifest: %w", err)
	}
	if m.Version != manifestVersion {
		return m, fmt.Errorf("manifest has version %d, this is for %d", m.Version, manifestVersion)
	}
	for _, name := range []string{rootFile, layerFile, memoryFile, stateFile} {
		if !isFile(filepath.Join(dir, name)) {
			return m, fmt.Errorf("its file %s is missing", name)
		}
	}
	return m, nil
}
