package initramfs

import (
	"bytes"
	"compress/gzip"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
)

// maxModuleSize bounds what one module may inflate to, in bytes.
const maxModuleSize = 64 << 20

// want is a module that the guest uses.
type want struct {
	name     string // with underscores
	optional bool   // the guest works without it
}

// guestModules lists what the agent's guest needs, in the order of loading.
func guestModules() []want {
	return []want{
		// Before its users, which take the best implementation known at their start.
		{name: "crc32c_intel", optional: true},
		{name: "virtio_mmio"},
		{name: "virtio_blk"},
		{name: "virtio_net"},
		{name: "virtio_rng", optional: true},
		{name: "erofs"},
		{name: "ext4"},
		{name: "overlay"},
		{name: "fuse"},
	}
}

// module is a kernel module ready to be loaded.
type module struct {
	name string // with underscores
	data []byte // the ELF file, inflated
}

// resolve returns the wanted modules and all that they depend on, dependencies first.
// What is built into the kernel is left out. Dependencies come from the modules
// themselves, since a kernel package that was unpacked and not installed has no
// modules.dep.
func resolve(dir, release string, wanted []want) ([]module, error) {
	r := resolver{release: release, done: map[string]bool{}}
	var err error
	if r.builtin, err = readBuiltin(filepath.Join(dir, "modules.builtin")); err != nil {
		return nil, err
	}
	if r.files, err = indexModules(dir); err != nil {
		return nil, err
	}
	for _, w := range wanted {
		if w.optional && !r.known(w.name) {
			continue
		}
		if err := r.add(w.name); err != nil {
			return nil, err
		}
	}
	return r.order, nil
}

type resolver struct {
	release string
	builtin map[string]bool
	files   map[string]string // path by module name
	done    map[string]bool
	order   []module
}

func (r *resolver) known(name string) bool { return r.builtin[name] || r.files[name] != "" }

func (r *resolver) add(name string) error {
	if r.builtin[name] || r.done[name] {
		return nil
	}
	r.done[name] = true // before its dependencies: a cycle ends here
	path := r.files[name]
	if path == "" {
		return fmt.Errorf("kernel %s has no module %s", r.release, name)
	}
	data, err := readModule(path)
	if err != nil {
		return fmt.Errorf("read module %s: %w", path, err)
	}
	info, err := parseInfo(data)
	if err != nil {
		return fmt.Errorf("read module %s: %w", path, err)
	}
	if info.release != r.release {
		return fmt.Errorf("module %s is built for kernel %q, not %q", path, info.release, r.release)
	}
	for _, dep := range info.softDepends {
		// Soft ones may name aliases, which are always optional.
		if !r.known(dep) {
			continue
		}
		if err := r.add(dep); err != nil {
			return err
		}
	}
	for _, dep := range info.depends {
		if err := r.add(dep); err != nil {
			return fmt.Errorf("%s needs: %w", name, err)
		}
	}
	r.order = append(r.order, module{name: name, data: data})
	return nil
}

func readBuiltin(path string) (map[string]bool, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	builtin := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		if name, ok := moduleName(strings.TrimSpace(line)); ok {
			builtin[name] = true
		}
	}
	return builtin, nil
}

func indexModules(dir string) (map[string]string, error) {
	files := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		if name, ok := moduleName(path); ok {
			files[name] = path
		}
		return nil
	})
	return files, err
}

// moduleName returns the kernel's name of the module in a file.
func moduleName(path string) (string, bool) {
	stem, ext, ok := strings.Cut(filepath.Base(path), ".ko")
	if !ok || stem == "" {
		return "", false
	}
	switch ext {
	case "", ".xz", ".zst", ".gz":
		return normalize(stem), true
	}
	return "", false
}

func normalize(name string) string { return strings.ReplaceAll(name, "-", "_") }

// readModule returns the module's ELF file.
func readModule(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var r io.Reader = f
	switch filepath.Ext(path) {
	case ".xz":
		r, err = xz.NewReader(f)
	case ".gz":
		r, err = gzip.NewReader(f)
	case ".zst":
		var d *zstd.Decoder
		if d, err = zstd.NewReader(f, zstd.WithDecoderConcurrency(1)); err == nil {
			defer d.Close()
			r = d
		}
	}
	if err != nil {
		return nil, err
	}
	data, err := io.ReadAll(io.LimitReader(r, maxModuleSize+1))
	if err != nil {
		return nil, err
	}
	if len(data) > maxModuleSize {
		return nil, fmt.Errorf("inflates to more than %d bytes", maxModuleSize)
	}
	return data, nil
}

// moduleInfo is what a module says of itself in its section .modinfo.
type moduleInfo struct {
	release     string // of the kernel that it is built for
	depends     []string
	softDepends []string // those to be loaded before
}

func parseInfo(data []byte) (moduleInfo, error) {
	f, err := elf.NewFile(bytes.NewReader(data))
	if err != nil {
		return moduleInfo{}, err
	}
	section := f.Section(".modinfo")
	if section == nil {
		return moduleInfo{}, errors.New("it has no section .modinfo")
	}
	text, err := section.Data()
	if err != nil {
		return moduleInfo{}, err
	}
	var info moduleInfo
	for field := range strings.SplitSeq(string(text), "\x00") {
		key, value, _ := strings.Cut(field, "=")
		switch key {
		case "vermagic":
			info.release, _, _ = strings.Cut(value, " ")
		case "depends":
			info.depends = append(info.depends, splitNames(value, ",")...)
		case "softdep":
			pre, _, _ := strings.Cut(value, "post:")
			if _, names, ok := strings.Cut(pre, "pre:"); ok {
				info.softDepends = append(info.softDepends, splitNames(names, " ")...)
			}
		}
	}
	return info, nil
}

func splitNames(s, sep string) []string {
	var names []string
	for name := range strings.SplitSeq(s, sep) {
		if name = strings.TrimSpace(name); name != "" {
			names = append(names, normalize(name))
		}
	}
	return names
}
