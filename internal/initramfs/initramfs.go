// Package initramfs builds the guest's initial RAM file system: the agent as /init and
// the kernel modules that it loads. Nothing in it depends on the OCI image that the
// guest will run, so one archive serves every template.
package initramfs

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cubesandbox/cubelet/internal/durable"
)

// formatVersion is part of the digest that BuildFile records; it changes whenever the
// same inputs give another archive.
const formatVersion = "cube-initramfs-1"

// Config names the inputs of an archive.
type Config struct {
	Agent      string // path of the statically linked agent
	ModulesDir string // content of /lib/modules/<Release>; needs no depmod files
	Release    string // kernel release that every module must be built for
}

// Build writes the archive to w as an uncompressed newc cpio, deterministic in its
// inputs: inflating it costs an emulated guest more than reading it.
// Modules are /modules/NNN-name.ko; loading them in the order of their names satisfies
// every dependency.
func Build(w io.Writer, cfg Config) error {
	in, err := collect(cfg)
	if err != nil {
		return err
	}
	return in.write(w)
}

// BuildFile makes path the archive of cfg. It replaces the file atomically and durably,
// and does nothing when path was built from the same inputs, which it records in
// path.digest.
func BuildFile(path string, cfg Config) error {
	in, err := collect(cfg)
	if err != nil {
		return err
	}
	record := path + ".digest"
	current, err := isCurrent(path, record, in.digest())
	if err != nil || current {
		return err
	}
	var archive bytes.Buffer
	if err := in.write(&archive); err != nil {
		return err
	}
	// The record goes last: a crash in between leaves a record of other inputs, or of
	// another size, and the archive is built once more.
	if err := durable.WriteFile(path, archive.Bytes(), 0o644); err != nil {
		return fmt.Errorf("write initramfs: %w", err)
	}
	line := fmt.Sprintf("%s %d\n", in.digest(), archive.Len())
	if err := durable.WriteFile(record, []byte(line), 0o644); err != nil {
		return fmt.Errorf("record the inputs of the initramfs: %w", err)
	}
	return nil
}

func isCurrent(path, record, digest string) (bool, error) {
	st, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look at the initramfs: %w", err)
	}
	have, err := os.ReadFile(record)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("read the initramfs record: %w", err)
	}
	return string(have) == fmt.Sprintf("%s %d\n", digest, st.Size()), nil
}

// inputs is everything that ends up in an archive.
type inputs struct {
	agent   []byte
	modules []module // in load order
}

func collect(cfg Config) (inputs, error) {
	agent, err := os.ReadFile(cfg.Agent)
	if err != nil {
		return inputs{}, fmt.Errorf("read the guest agent: %w", err)
	}
	if !bytes.HasPrefix(agent, []byte("\x7fELF")) {
		return inputs{}, fmt.Errorf("guest agent %s is not an ELF program", cfg.Agent)
	}
	modules, err := resolve(cfg.ModulesDir, cfg.Release, guestModules())
	if err != nil {
		return inputs{}, fmt.Errorf("collect kernel modules from %s: %w", cfg.ModulesDir, err)
	}
	return inputs{agent: agent, modules: modules}, nil
}

func (in inputs) digest() string {
	h := sha256.New()
	add := func(name string, data []byte) {
		fmt.Fprintf(h, "%s %d\n", name, len(data))
		_, _ = h.Write(data) // a hash never fails
	}
	add(formatVersion, nil)
	add("init", in.agent)
	for _, m := range in.modules {
		add(m.name, m.data)
	}
	return "sha256:" + hex.EncodeToString(h.Sum(nil))
}

func (in inputs) write(w io.Writer) error {
	a := &archive{w: w}
	for _, dir := range []string{"dev", "proc", "sys", "run", "modules"} {
		a.add(entry{name: dir, mode: modeDir | 0o755})
	}
	// The kernel opens /dev/console for PID 1 before anything can be mounted.
	a.add(entry{name: "dev/console", mode: modeChar | 0o600, major: 5, minor: 1})
	a.add(entry{name: "init", mode: modeRegular | 0o755, data: in.agent})
	for i, m := range in.modules {
		name := filepath.Join("modules", fmt.Sprintf("%03d-%s.ko", i, m.name))
		a.add(entry{name: name, mode: modeRegular | 0o644, data: m.data})
	}
	if err := a.close(); err != nil {
		return fmt.Errorf("write initramfs: %w", err)
	}
	return nil
}
