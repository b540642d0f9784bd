package template

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"encoding/hex"
	"encoding/json"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	cube "github.com/cubesandbox/cubelet"
)

// Defaults of a TemplateSpec, and its bounds.
const (
	defaultVCPUs     = 1
	defaultMemoryMiB = 512
	defaultDiskMiB   = 1024
	defaultReady     = 60 * time.Second

	minMemoryMiB = 128
	minDiskMiB   = 64
	maxDiskMiB   = 4 << 20 // 4 TiB
	maxReady     = time.Hour

	idPrefix = "tpl-"
)

var (
	idPattern   = regexp.MustCompile(`^tpl-[a-z0-9]{5,40}$`)
	namePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,62}$`)
)

// newID draws an ID. Base 32 in lower case without padding: 60 random bits.
func newID() string {
	var b [8]byte
	rand.Read(b[:])
	return idPrefix + strings.ToLower(base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(b[:]))[:12]
}

// Bounds are the sizes that machines of this node may have.
type Bounds struct {
	MaxVCPUs, MaxMemoryMiB int
}

func (b Bounds) check(r cube.Resources) error {
	switch {
	case r.VCPUs < 1 || r.VCPUs > b.MaxVCPUs:
		return cube.InvalidField("resources.vcpus", "%d is not between 1 and %d, what this node can run", r.VCPUs, b.MaxVCPUs)
	case r.MemoryMiB < minMemoryMiB || r.MemoryMiB > b.MaxMemoryMiB:
		return cube.InvalidField("resources.memory_mib", "%d is not between %d and %d, what this node can run", r.MemoryMiB, minMemoryMiB, b.MaxMemoryMiB)
	}
	return nil
}

// complete fills in the defaults of the spec and checks it.
func complete(s cube.TemplateSpec, b Bounds) (cube.TemplateSpec, error) {
	if s.Resources.VCPUs == 0 {
		s.Resources.VCPUs = defaultVCPUs
	}
	if s.Resources.MemoryMiB == 0 {
		s.Resources.MemoryMiB = defaultMemoryMiB
	}
	if s.DiskMiB == 0 {
		s.DiskMiB = defaultDiskMiB
	}
	if s.Ready.Timeout == 0 {
		s.Ready.Timeout = defaultReady
	}
	if err := b.check(s.Resources); err != nil {
		return s, err
	}
	for _, check := range []func(cube.TemplateSpec) error{checkNames, checkSource, checkReady, checkEnv} {
		if err := check(s); err != nil {
			return s, err
		}
	}
	return s, nil
}

func checkNames(s cube.TemplateSpec) error {
	switch {
	case s.ID != "" && !idPattern.MatchString(s.ID):
		return cube.InvalidField("id", "%q does not have the form tpl-[a-z0-9]{5,40}", s.ID)
	case s.Name != "" && !namePattern.MatchString(s.Name):
		return cube.InvalidField("name", "%q is no name: one to 63 of a-z, 0-9, '.', '_' and '-', the first a letter or digit", s.Name)
	case strings.HasPrefix(s.Name, idPrefix):
		return cube.InvalidField("name", "%q looks like an ID: a name cannot begin with %s", s.Name, idPrefix)
	}
	return nil
}

func checkSource(s cube.TemplateSpec) error {
	switch {
	case s.Image == "" && s.ArchivePath == "":
		return cube.InvalidField("image", "is required unless there is an archive path")
	case s.Image != "" && s.ArchivePath != "":
		return cube.InvalidField("archive_path", "an image is given already")
	case s.ArchivePath != "" && !filepath.IsAbs(s.ArchivePath):
		return cube.InvalidField("archive_path", "%q is not an absolute path", s.ArchivePath)
	case s.DiskMiB < minDiskMiB || s.DiskMiB > maxDiskMiB:
		return cube.InvalidField("disk_mib", "%d is not between %d and %d", s.DiskMiB, minDiskMiB, maxDiskMiB)
	}
	return nil
}

func checkReady(s cube.TemplateSpec) error {
	switch {
	case s.Ready.Port < 0 || s.Ready.Port > 65535:
		return cube.InvalidField("ready.port", "%d is no TCP port", s.Ready.Port)
	case s.Ready.Port != 0 && s.Ready.Command != "":
		return cube.InvalidField("ready", "at most one of command and port can be set")
	case s.Ready.Timeout < 0 || s.Ready.Timeout > maxReady:
		return cube.InvalidField("ready.timeout", "%s is not between 0 and %s", s.Ready.Timeout, maxReady)
	case strings.ContainsRune(s.StartCommand, 0):
		return cube.InvalidField("start_command", "contains a zero byte")
	case strings.ContainsRune(s.Ready.Command, 0):
		return cube.InvalidField("ready.command", "contains a zero byte")
	}
	return nil
}

func checkEnv(s cube.TemplateSpec) error {
	for k, v := range s.Env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return cube.InvalidField("env", "%q is no variable", k)
		}
	}
	return nil
}

// digest identifies a complete request, apart from its idempotency key.
func digest(s cube.TemplateSpec) (string, error) {
	s.IdempotencyKey = ""
	b, err := json.Marshal(s) // map keys are sorted
	if err != nil {
		return "", cube.Errorf(cube.CodeInternal, "encode request: %w", err)
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:]), nil
}
