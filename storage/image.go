package storage

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/durable"
)

const (
	defaultImageBytes = 64 << 30
	defaultMinFree    = 2 << 30
	// minImageBytes is a little above the 300 MB under which mkfs.xfs refuses.
	minImageBytes = 320 << 20
	// tempSuffix names an image that mkfs has not finished. It is never mounted.
	tempSuffix = ".making"
)

// makeImage makes a sparse image with an empty XFS under its final name, or nothing.
func makeImage(ctx context.Context, cfg Config) (err error) {
	dir := filepath.Dir(cfg.Image)
	if err := durable.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	size, err := imageSize(cfg, dir)
	if err != nil {
		return err
	}
	temp := cfg.Image + tempSuffix
	// A mkfs of an earlier daemon may still write to the old file: it gets a new one.
	if err := os.Remove(temp); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, durable.Remove(temp))
		}
	}()
	if err := makeSparse(temp, size); err != nil {
		return err
	}
	start := time.Now()
	if err := mkfs(ctx, temp); err != nil {
		return err
	}
	if err := durable.SyncFile(temp); err != nil {
		return err
	}
	if err := durable.Rename(temp, cfg.Image); err != nil {
		return err
	}
	cfg.Log.Info("made pool image", "path", cfg.Image, "bytes", size, "took", time.Since(start))
	return nil
}

// imageSize decides how large a new image is.
func imageSize(cfg Config, dir string) (int64, error) {
	_, free, err := spaceOf(dir)
	if err != nil {
		return 0, err
	}
	minFree := cfg.MinFreeBytes
	if minFree == 0 {
		minFree = defaultMinFree
	}
	if free < minFree {
		return 0, cube.Errorf(cube.CodeNoSpace, "%s has %d MiB free, a pool needs at least %d", dir, free>>20, minFree>>20).
			WithHint("Free space there, or put the root directory on a larger file system.")
	}
	size := cfg.SizeBytes
	if size == 0 {
		size = max(min(defaultImageBytes, free/5*4), minImageBytes)
	}
	if size < minImageBytes {
		return 0, cube.InvalidField("pool.size", "%d MiB is too small for a pool, the least is %d MiB", size>>20, minImageBytes>>20)
	}
	if size > free {
		cfg.Log.Warn("the pool image is larger than what the host has free", "bytes", size, "free", free)
	}
	return size, nil
}

func makeSparse(path string, size int64) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(f.Truncate(size), f.Close())
}

// mkfs makes an XFS with reflinks in the file. It has no time limit but ctx.
func mkfs(ctx context.Context, path string) error {
	cmd := exec.CommandContext(ctx, "mkfs.xfs", "-q", "-f", "-m", "reflink=1,crc=1", path)
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("mkfs.xfs: %w", context.Cause(ctx))
	case errors.Is(err, exec.ErrNotFound):
		return cube.Errorf(cube.CodeFailedPrecondition, "mkfs.xfs: %w", err).WithHint("Install xfsprogs.")
	case err != nil:
		return fmt.Errorf("mkfs.xfs: %w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

// checkImage looks at an image's superblock, to say plainly what mount would not.
func checkImage(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close() // read only
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return cube.Errorf(cube.CodeFailedPrecondition, "pool image %s is not a regular file", path)
	}
	super := make([]byte, 16)
	if _, err := io.ReadFull(f, super); err != nil || string(super[:4]) != "XFSB" {
		return damagedImage(path, errors.New("it does not hold an XFS"))
	}
	blockSize, blocks := uint64(binary.BigEndian.Uint32(super[4:])), binary.BigEndian.Uint64(super[8:])
	if blockSize == 0 || blocks > uint64(info.Size())/blockSize {
		return damagedImage(path, fmt.Errorf("its file system has %d blocks of %d bytes, the file only %d bytes", blocks, blockSize, info.Size()))
	}
	return nil
}

func damagedImage(path string, err error) error {
	return cube.Errorf(cube.CodeFailedPrecondition, "pool image %s is damaged: %w", path, err).
		WithHint("Nothing was changed. Look at it with `xfs_repair -n`, restore it, or move it away to start with an empty pool.")
}
