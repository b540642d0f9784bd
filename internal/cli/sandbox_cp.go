package cli

import (
	"context"
	"errors"
	"fmt"
	"path"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/api/envd/filesystem"
)

func (a *app) sandboxCp() *cobra.Command {
	var user string
	cmd := &cobra.Command{
		Use:   "cp SOURCE DESTINATION",
		Short: "Copy files into or out of a sandbox",
		Long: `Copy a file or a directory with all that is in it. One side is SANDBOX:PATH, the other a
local path, or - for standard input or output. A local path with a colon needs a slash
before it, as in ./a:b.

A directory is copied into DESTINATION when that is a directory, else it becomes
DESTINATION; "SOURCE/." copies what is in it. Files keep their modes, symbolic links stay
links where the other side can have them. What is not copied is listed, and makes the
command fail. A local file appears under its name only when it is whole.`,
		Example: `  cubecli sandbox cp main.py s3k2:/work/main.py
  cubecli sandbox cp ./src s3k2:/work
  cubecli sandbox cp s3k2:/var/log ./guest-log
  tar c data | cubecli sandbox cp - s3k2:/tmp/data.tar
  cubecli sandbox cp s3k2:/etc/os-release -`,
		Args: args(cobra.ExactArgs(2)),
		RunE: func(cmd *cobra.Command, args []string) error {
			return during("copy", a.runCp(cmd, args[0], args[1], user))
		},
	}
	cmd.Flags().StringVarP(&user, "user", "u", user, "`USER` who owns the files in the sandbox (default: the sandbox's default user)")
	return cmd
}

// place is one side of a copy.
type place struct {
	sandbox string // empty: this machine
	path    string
}

// parsePlace splits SANDBOX:PATH. What begins with a slash or a dot is local.
func parsePlace(s string) place {
	ref, p, ok := strings.Cut(s, ":")
	if !ok || ref == "" || strings.HasPrefix(s, ".") || strings.Contains(ref, "/") {
		return place{path: s}
	}
	return place{sandbox: ref, path: p}
}

func (a *app) runCp(cmd *cobra.Command, source, destination, user string) error {
	src, dst := parsePlace(source), parsePlace(destination)
	if (src.sandbox == "") == (dst.sandbox == "") {
		return cube.Errorf(cube.CodeInvalid, "exactly one side must be SANDBOX:PATH").
			WithHint("For example: cubecli sandbox cp main.py s3k2:/work/main.py")
	}
	if src.path == "" || dst.path == "" {
		return cube.Errorf(cube.CodeInvalid, "a path is empty")
	}
	c, err := a.dial()
	if err != nil {
		return err
	}
	ctx, cancel := a.call(cmd)
	defer cancel()
	x := &copier{app: a, client: c, sandbox: src.sandbox + dst.sandbox, user: user, show: a.newProgress()}
	x.guest = newGuestFiles(c, x.sandbox, user)
	defer x.show.close()
	if src.sandbox != "" {
		err = x.download(ctx, src.path, dst.path)
	} else {
		err = x.upload(ctx, src.path, dst.path)
	}
	if err != nil {
		return err
	}
	return x.skipped()
}

// copier carries out one copy.
type copier struct {
	app     *app
	client  *client
	guest   *guestFiles
	sandbox string
	user    string
	show    *progress
	done    int64
	total   int64 // 0 when unknown
	missed  int
}

// skip reports something that is not copied.
func (x *copier) skip(name, format string, args ...any) {
	x.missed++
	x.show.close()
	fmt.Fprintf(x.app.stderr, "cubecli: %s: not copied: %s\n", line(name), line(fmt.Sprintf(format, args...)))
}

func (x *copier) skipped() error {
	if x.missed == 0 {
		return nil
	}
	return fmt.Errorf("%d of the entries were not copied", x.missed)
}

// counter counts what passes through a copy.
type counter struct {
	x    *copier
	name string
}

// Write implements io.Writer.
func (c *counter) Write(p []byte) (int, error) {
	c.x.done += int64(len(p))
	if c.x.show.width > 0 {
		c.x.show.update(line(c.name), "copy", c.x.done, c.x.total)
	}
	return len(p), nil
}

// into returns where base goes: below the destination when that is a directory.
func into(dst *filesystem.EntryInfo, dstPath, base string) string {
	if dst.GetType() == filesystem.FileType_FILE_TYPE_DIRECTORY || strings.HasSuffix(dstPath, "/") {
		return path.Join(dstPath, base)
	}
	return dstPath
}

// localBase is the name under which a local source is copied into a directory; empty
// for "DIR/.", whose content is meant.
func localBase(p string) (string, error) {
	if p == "." || strings.HasSuffix(p, "/.") {
		return "", nil
	}
	full, err := filepath.Abs(p)
	if err != nil {
		return "", err
	}
	return filepath.Base(full), nil
}

func isCanceled(ctx context.Context, err error) bool {
	return ctx.Err() != nil || errors.Is(err, context.Canceled)
}
