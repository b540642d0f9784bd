// Package tplimage holds what a template hands to the engine: plain data that both the
// engine and internal/template may import.
package tplimage

import cube "github.com/cubesandbox/cubelet"

// Image is everything a sandbox needs of a template at one size.
type Image struct {
	TemplateID string
	Resources  cube.Resources
	RootPath   string // EROFS root disk, read-only
	LayerPath  string // writable layer as it was when the memory image was taken
	MemoryPath string
	StatePath  string
	MAC        string
	Config     cube.ImageConfig
	Env        map[string]string
}
