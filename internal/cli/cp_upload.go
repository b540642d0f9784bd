package cli

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
	"github.com/cubesandbox/cubelet/api/envd/filesystem"
)

const (
	// plainMode is the mode that a guest gives to an uploaded file, dirMode to a directory.
	plainMode fs.FileMode = 0o644
	dirMode   fs.FileMode = 0o755
	// chmodBatch is how many files one program in the guest is told about.
	chmodBatch = 100
)

// upload copies a local path, or standard input, into the guest.
func (x *copier) upload(ctx context.Context, src, dst string) error {
	target, err := x.guest.stat(ctx, dst)
	if err != nil {
		return err
	}
	if src == "-" {
		if target.GetType() == filesystem.FileType_FILE_TYPE_DIRECTORY {
			return fmt.Errorf("%s is a directory; name the file", dst)
		}
		return x.send(ctx, dst, x.app.stdin)
	}
	st, err := os.Stat(src)
	if err != nil {
		return err
	}
	base, err := localBase(src)
	if err != nil {
		return err
	}
	to := into(target, dst, base)
	if st.IsDir() {
		if target != nil && target.GetType() != filesystem.FileType_FILE_TYPE_DIRECTORY {
			return fmt.Errorf("%s is no directory", dst)
		}
		return x.uploadTree(ctx, src, to)
	}
	x.total = st.Size()
	modes := map[fs.FileMode][]string{}
	if err := x.uploadFile(ctx, src, to, modes); err != nil {
		return err
	}
	return x.setModes(ctx, modes)
}

// send stores what r holds as the guest's file.
func (x *copier) send(ctx context.Context, to string, r io.Reader) error {
	return x.guest.write(ctx, to, io.TeeReader(r, &counter{x, to}))
}

func (x *copier) uploadFile(ctx context.Context, src, to string, modes map[fs.FileMode][]string) error {
	f, err := os.Open(src)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return fmt.Errorf("%s is no regular file", src)
	}
	if err := x.send(ctx, to, f); err != nil {
		return err
	}
	if mode := st.Mode().Perm(); mode != plainMode {
		modes[mode] = append(modes[mode], to)
	}
	return nil
}

// link is a symbolic link to be made in the guest.
type link struct{ path, target string }

// uploadTree copies a directory: first directories and files, then links, then modes, so
// that no link leads a file astray and no mode keeps one out.
func (x *copier) uploadTree(ctx context.Context, src, to string) error {
	x.total = treeSize(src)
	modes := map[fs.FileMode][]string{}
	var links []link
	err := filepath.WalkDir(src, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			x.skip(p, "%v", err)
			return nil
		}
		rel, err := filepath.Rel(src, p)
		if err != nil {
			return err
		}
		name := path.Join(to, filepath.ToSlash(rel))
		switch d.Type() {
		case fs.ModeDir:
			return x.uploadDir(ctx, d, name, modes)
		case fs.ModeSymlink:
			target, err := os.Readlink(p)
			if err != nil {
				x.skip(p, "%v", err)
				return nil
			}
			links = append(links, link{name, target})
		case 0:
			if err := x.uploadFile(ctx, p, name, modes); err != nil {
				if isCanceled(ctx, err) {
					return err
				}
				x.skip(p, "%s", explain(err).text)
			}
		default:
			x.skip(p, "it is neither a file, a directory nor a link")
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := x.makeLinks(ctx, links); err != nil {
		return err
	}
	return x.setModes(ctx, modes)
}

func (x *copier) uploadDir(ctx context.Context, d fs.DirEntry, name string, modes map[fs.FileMode][]string) error {
	if err := x.guest.makeDir(ctx, name); err != nil {
		return err
	}
	if info, err := d.Info(); err == nil && info.Mode().Perm() != dirMode {
		modes[info.Mode().Perm()] = append(modes[info.Mode().Perm()], name)
	}
	return nil
}

func treeSize(dir string) int64 {
	var n int64
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error { // only for the bar
		if err == nil && d.Type().IsRegular() {
			if info, err := d.Info(); err == nil {
				n += info.Size()
			}
		}
		return nil
	})
	return n
}

// makeLinks makes links with the guest's ln; the file protocol has none.
func (x *copier) makeLinks(ctx context.Context, links []link) error {
	for _, l := range links {
		if err := x.program(ctx, "ln", "-sfn", "--", l.target, l.path); err != nil {
			if isCanceled(ctx, err) {
				return err
			}
			x.skip(l.path, "%s", explain(err).text)
		}
	}
	return nil
}

// setModes sets modes with the guest's chmod; the file protocol sets none. A guest
// without it keeps its files with the usual mode.
func (x *copier) setModes(ctx context.Context, modes map[fs.FileMode][]string) error {
	for mode, paths := range modes {
		for len(paths) > 0 {
			n := min(len(paths), chmodBatch)
			err := x.program(ctx, "chmod", append([]string{fmt.Sprintf("%04o", mode), "--"}, paths[:n]...)...)
			paths = paths[n:]
			if err == nil {
				continue
			}
			if isCanceled(ctx, err) {
				return err
			}
			x.show.close()
			fmt.Fprintf(x.app.stderr, "cubecli: mode %04o is not kept: %s\n", mode, line(explain(err).text))
		}
	}
	return nil
}

// program runs a program in the guest as the user.
func (x *copier) program(ctx context.Context, name string, args ...string) error {
	start := &cubev1.ExecStart{SandboxId: x.sandbox, Args: append([]string{name}, args...), User: x.user}
	stream := x.client.sandboxes.ExecSandbox(ctx)
	defer stream.CloseResponse() //nolint:errcheck // the exit is known
	if err := stream.Send(&cubev1.ExecSandboxRequest{Request: &cubev1.ExecSandboxRequest_Start{Start: start}}); err != nil {
		return err
	}
	var said []byte
	for {
		m, err := stream.Receive()
		if err != nil {
			return err
		}
		said = append(said, m.GetStderr()...)
		if exit := m.GetExited(); exit != nil && exit.GetExitCode() != 0 {
			return fmt.Errorf("%s: %s %s", name, exit.GetStatus(), said)
		} else if exit != nil {
			return nil
		}
	}
}
