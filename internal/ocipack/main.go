// Command ocipack packs a root file system (a tar) as an OCI image archive: one layer
// and the configuration of the base image. scripts/build-base-image runs it.
//
// usage: ocipack ROOTFS.tar OUT.tar
package main

import (
	"archive/tar"
	"compress/gzip"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: ocipack ROOTFS.tar OUT.tar")
		os.Exit(2)
	}
	if err := pack(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "ocipack:", err)
		os.Exit(1)
	}
}

// config is what a program in the base image finds: an ordinary user with its home.
func config() v1.Config {
	return v1.Config{
		User:       "user",
		Env:        []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8"},
		WorkingDir: "/home/user",
		Cmd:        []string{"/bin/bash"},
	}
}

// pack writes the image archive out (an OCI layout in a tar) from the tar rootfs. A
// scratch directory beside out holds the layout meanwhile.
func pack(rootfs, out string) error {
	scratch, err := os.MkdirTemp(filepath.Dir(out), "layout-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(scratch)

	layer, err := tarball.LayerFromFile(rootfs,
		tarball.WithMediaType(types.OCILayer), tarball.WithCompressionLevel(gzip.BestSpeed), tarball.WithCompressedCaching)
	if err != nil {
		return fmt.Errorf("read %s: %w", rootfs, err)
	}
	image, err := imageOf(layer)
	if err != nil {
		return err
	}
	index, err := layout.Write(scratch, empty.Index)
	if err != nil {
		return fmt.Errorf("write layout: %w", err)
	}
	if err := index.AppendImage(image, layout.WithAnnotations(map[string]string{
		"org.opencontainers.image.ref.name": "base",
	})); err != nil {
		return fmt.Errorf("write layout: %w", err)
	}
	return archive(scratch, out)
}

func imageOf(layer v1.Layer) (v1.Image, error) {
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err := mutate.AppendLayers(image, layer)
	if err != nil {
		return nil, fmt.Errorf("add layer: %w", err)
	}
	file, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	file = file.DeepCopy()
	file.OS, file.Architecture = "linux", "amd64"
	file.Config = config()
	return mutate.ConfigFile(image, file)
}

// archive writes the files below dir to the tar out, in a fixed order and without
// owners or times.
func archive(dir, out string) error {
	f, err := os.Create(out)
	if err != nil {
		return err
	}
	defer f.Close()
	w := tar.NewWriter(f)
	if err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		return add(w, dir, path, d)
	}); err != nil {
		return fmt.Errorf("archive: %w", err)
	}
	if err := w.Close(); err != nil {
		return err
	}
	return f.Close()
}

func add(w *tar.Writer, dir, path string, d fs.DirEntry) error {
	name, err := filepath.Rel(dir, path)
	if err != nil {
		return err
	}
	if d.IsDir() {
		return w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: 0o755})
	}
	info, err := d.Info()
	if err != nil {
		return err
	}
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: info.Size()}); err != nil {
		return err
	}
	src, err := os.Open(path)
	if err != nil {
		return err
	}
	defer src.Close()
	_, err = io.Copy(w, src)
	return err
}
