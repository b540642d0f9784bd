// Package tplimage holds what a template hands to the engine: plain data that both the
// engine and internal/template may import.
package tplimage

import cube "github.com/cubesandbox/cubelet"

// Image is everything a sandbox needs of a template at one size, or of a snapshot.
type Image struct {
	TemplateID string
	// SnapshotID is empty for a template's image. With it comes GuestToken, the access
	// token that the frozen guest's agent expects.
	SnapshotID string `json:",omitempty"`
	GuestToken string `json:",omitempty"`
	Resources  cube.Resources
	RootPath   string // EROFS root disk, read-only
	LayerPath  string // writable layer as it was when the memory image was taken
	MemoryPath string
	StatePath  string
	MAC        string
	Config     cube.ImageConfig
	Env        map[string]string
}

// Source names an OCI image. Exactly one of Image and ArchivePath is set.
type Source struct {
	Image       string // registry reference
	PlainHTTP   bool   // allow a registry without TLS; localhost needs no permission
	ArchivePath string // OCI layout or `docker save` tar
}

// Root tells what a root disk was made of.
type Root struct {
	Ref      string // the reference or archive, as it was given
	Digest   string // of the image's manifest
	Platform string // for example linux/amd64
	Config   cube.ImageConfig
	Bytes    int64 // of the EROFS image
}
