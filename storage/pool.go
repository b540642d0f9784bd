package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"sync"

	"golang.org/x/sys/unix"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/durable"
)

// Config configures a pool.
type Config struct {
	// Dir is where the pool is, an absolute path.
	Dir string
	// Image is the file that holds the pool's file system when Dir has no reflinks by
	// itself. Empty: no image is made.
	Image string
	// SizeBytes is the size of a new image; an existing one keeps its size. Zero: 64 GiB,
	// or four fifths of what the host has free when that is less.
	SizeBytes int64
	// MinFreeBytes is what the host's file system must have free for a new image. Zero: 2 GiB.
	MinFreeBytes int64
	// AllowNoReflink accepts a pool on which clones are copies when a pool with reflinks
	// cannot be had.
	AllowNoReflink bool
	Log            *slog.Logger
}

// Pool is an open pool. Its methods may be used at the same time.
type Pool struct {
	dir     string
	image   string // empty unless the pool is mounted from it
	reflink bool
	log     *slog.Logger
	lock    *os.File // keeps a second daemon out
	root    *os.File // the pool's directory
	probing sync.Mutex
	fs      files
}

const (
	templatesName = "templates"
	sandboxesName = "sandboxes"
	snapshotsName = "snapshots"
	scratchName   = "scratch"
	lockName      = ".lock"
)

// OpenPool opens the pool and makes it when there is none: see Config. What an earlier
// daemon left in the scratch directory is removed. The caller closes the pool.
//
// Codes: FailedPrecondition (in use by another process, no reflinks, the image is damaged
// or too small: nothing is deleted then), NoSpace (for a new image), Invalid (sizes),
// DeadlineExceeded, Canceled, Internal.
func OpenPool(ctx context.Context, cfg Config) (*Pool, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if !filepath.IsAbs(cfg.Dir) {
		return nil, cube.Errorf(cube.CodeInvalid, "pool directory %q is not an absolute path", cfg.Dir)
	}
	if err := durable.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make pool directory: %w", err)
	}
	if err := provide(ctx, cfg); err != nil {
		return nil, err
	}
	p := &Pool{dir: filepath.Clean(cfg.Dir), log: cfg.Log}
	if err := p.take(ctx, cfg); err != nil {
		return nil, errors.Join(fmt.Errorf("open pool %s: %w", p.dir, err), p.release())
	}
	p.log.Info("pool is open", "dir", p.dir, "image", p.image, "reflink", p.reflink)
	return p, nil
}

// provide sees to it that the pool's file system is at cfg.Dir.
func provide(ctx context.Context, cfg Config) error {
	mounted, err := isMountRoot(cfg.Dir)
	if err != nil || mounted {
		return err
	}
	exists := cfg.Image != "" && pathExists(cfg.Image)
	if !exists {
		if can, err := canReflink(cfg.Dir); err != nil || can || cfg.Image == "" {
			return err
		}
	}
	err = mountImage(ctx, cfg, exists)
	if err == nil || !cfg.AllowNoReflink || exists || ctx.Err() != nil {
		return err
	}
	cfg.Log.Warn("no pool image: clones will be copies", "err", err)
	return nil
}

// mountImage mounts the image at cfg.Dir, making it first unless it exists.
func mountImage(ctx context.Context, cfg Config, exists bool) error {
	if !exists {
		if err := makeImage(ctx, cfg); err != nil {
			return fmt.Errorf("make pool image: %w", err)
		}
	}
	if entries, err := os.ReadDir(cfg.Dir); err == nil && len(entries) > 0 {
		cfg.Log.Warn("the pool is mounted over files that are now hidden", "dir", cfg.Dir, "files", len(entries))
	}
	if err := checkImage(cfg.Image); err != nil {
		return err
	}
	if err := attachAndMount(ctx, cfg.Image, cfg.Dir, cfg.Log); err != nil {
		return fmt.Errorf("mount pool image: %w", err)
	}
	return nil
}

// take locks the directory and prepares it for use.
func (p *Pool) take(ctx context.Context, cfg Config) (err error) {
	if p.root, err = os.OpenFile(p.dir, os.O_RDONLY|unix.O_DIRECTORY, 0); err != nil {
		return err
	}
	if err := p.acquireLock(ctx); err != nil {
		return err
	}
	if cfg.Image != "" {
		if ours, err := mountedFrom(p.dir, cfg.Image); err != nil {
			return err
		} else if ours {
			p.image = cfg.Image
		}
	}
	for _, name := range [...]string{templatesName, sandboxesName, snapshotsName, scratchName} {
		if err := durable.MkdirAll(filepath.Join(p.dir, name), 0o700); err != nil {
			return err
		}
	}
	if p.reflink, err = canReflink(p.ScratchDir()); err != nil {
		return err
	}
	if !p.reflink {
		if !cfg.AllowNoReflink {
			return cube.Errorf(cube.CodeFailedPrecondition, "the file system has no reflinks").
				WithHint("Use XFS made with reflink=1, or btrfs, or let Cubelet make its own pool image.")
		}
		p.log.Warn("the pool has no reflinks: every clone is a full copy, slow and large", "dir", p.dir)
	}
	return p.clearScratch(ctx)
}

// clearScratch empties the scratch directory. What cannot be removed is logged: it is in
// nobody's way.
func (p *Pool) clearScratch(ctx context.Context) error {
	entries, err := os.ReadDir(p.ScratchDir())
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := p.removeTree(ctx, scratchName, e.Name()); err != nil {
			if ctx.Err() != nil {
				return err
			}
			p.log.Warn("scratch file stays", "name", e.Name(), "err", err)
		}
	}
	return nil
}

// Close gives the pool up. With unmount its image is unmounted too, which fails with
// FailedPrecondition while files on it are open; a file system that the pool was not
// mounted from an image by us stays. Sandboxes that run need the pool: unmount only when
// there are none.
func (p *Pool) Close(unmount bool) error {
	err := p.release()
	if !unmount || p.image == "" {
		return err
	}
	umount := unix.Unmount(p.dir, unix.UMOUNT_NOFOLLOW)
	if errors.Is(umount, unix.EBUSY) {
		umount = cube.Errorf(cube.CodeFailedPrecondition, "files on the pool are open: %w", umount)
	}
	if umount != nil {
		umount = fmt.Errorf("unmount %s: %w", p.dir, umount)
	}
	return errors.Join(err, umount)
}

func (p *Pool) release() error {
	var errs []error
	for _, f := range []*os.File{p.lock, p.root} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

// Reflink reports whether clones share their blocks.
func (p *Pool) Reflink() bool { return p.reflink }

// Dir returns the pool's directory.
func (p *Pool) Dir() string { return p.dir }

// TemplatesDir returns the directory that holds one directory per template.
func (p *Pool) TemplatesDir() string { return filepath.Join(p.dir, templatesName) }

// SnapshotsDir returns the directory that holds one directory per snapshot.
func (p *Pool) SnapshotsDir() string { return filepath.Join(p.dir, snapshotsName) }

// ScratchDir returns a directory for temporary files, which OpenPool empties.
func (p *Pool) ScratchDir() string { return filepath.Join(p.dir, scratchName) }

// SandboxesDir returns the directory that holds one directory per owner.
func (p *Pool) SandboxesDir() string { return filepath.Join(p.dir, sandboxesName) }

// SandboxDir returns the owner's directory, which may not exist. CodeInvalid when the
// name is not 1 to 64 of a-z, 0-9 and "-".
func (p *Pool) SandboxDir(owner string) (string, error) {
	if err := checkName(owner); err != nil {
		return "", err
	}
	return filepath.Join(p.SandboxesDir(), owner), nil
}

// Usage returns the size of the pool and how much of it is used, in bytes. When the pool
// is a sparse image, the size is no more than what the host's file system can still give.
func (p *Pool) Usage() (total, used int64, err error) {
	total, free, err := spaceOf(p.dir)
	if err != nil {
		return 0, 0, fmt.Errorf("pool usage: %w", err)
	}
	used = total - free
	if p.image != "" {
		_, hostFree, err := spaceOf(filepath.Dir(p.image))
		if err != nil {
			return 0, 0, fmt.Errorf("pool usage: %w", err)
		}
		total = min(total, used+hostFree)
	}
	return total, used, nil
}

// spaceOf returns the size of the file system and what an ordinary user may still write.
func spaceOf(path string) (total, free int64, err error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, 0, &fs.PathError{Op: "statfs", Path: path, Err: err}
	}
	return int64(st.Blocks) * st.Bsize, int64(st.Bavail) * st.Bsize, nil
}

func checkName(name string) error {
	if !regexp.MustCompile(`^[a-z0-9-]{1,64}$`).MatchString(name) {
		return cube.Errorf(cube.CodeInvalid, "%q is not a name of 1 to 64 of a-z, 0-9 and -", name)
	}
	return nil
}

func pathExists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}
