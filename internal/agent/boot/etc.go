package boot

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// identityFiles are the files of /etc that say who a machine is. Each is a file in memory
// that is mounted over the image's, as container engines do: writing one after a restore
// is then cheap, and what a sandbox is called never reaches the disk that a snapshot of it
// shares with others.
type identityFiles struct {
	hostname, hosts, machineID, resolvConf *os.File
}

// runDir holds the files.
const runDir = "/run/cube"

const hostsDefault = `127.0.0.1	localhost
::1	localhost ip6-localhost ip6-loopback
`

// hostsMark ends the line of /etc/hosts that is the agent's.
const hostsMark = "# cube"

// mountIdentity sets the files up. They begin with the image's content, except that
// no machine has the identity of the image.
func mountIdentity() (*identityFiles, error) {
	if err := ensureDir("/etc"); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(runDir, 0o755); err != nil {
		return nil, err
	}
	var f identityFiles
	for _, e := range [...]struct {
		name string
		file **os.File
	}{{"hostname", &f.hostname}, {"hosts", &f.hosts}, {"machine-id", &f.machineID}, {"resolv.conf", &f.resolvConf}} {
		file, err := mountOver("/etc/"+e.name, filepath.Join(runDir, e.name))
		if err != nil {
			return nil, err
		}
		*e.file = file
	}
	hosts, err := content(f.hosts)
	if err != nil {
		return nil, err
	}
	if strings.TrimSpace(hosts) == "" {
		hosts = hostsDefault
	}
	return &f, errors.Join(replace(f.hosts, hosts), replace(f.machineID, ""))
}

// mountOver makes file a copy of path and mounts it there.
func mountOver(path, file string) (*os.File, error) {
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if len(old) > maxIdentity {
		old = nil
	}
	if err := ensureFile(path); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return nil, err
	}
	if _, err := f.Write(old); err != nil {
		return nil, err
	}
	if err := unix.Mount(file, path, "", unix.MS_BIND, ""); err != nil {
		return nil, fmt.Errorf("mount over %s: %w", path, err)
	}
	return f, nil
}

// maxIdentity bounds what is kept of an image's file, in bytes.
const maxIdentity = 1 << 20

// ensureFile makes path a regular file. An image may have a link there, which often leads
// to a service that does not run here.
func ensureFile(path string) error {
	st, err := os.Lstat(path)
	if err == nil && st.Mode().IsRegular() {
		return nil
	}
	if err == nil {
		if err := os.RemoveAll(path); err != nil {
			return err
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.WriteFile(path, nil, 0o644)
}

func content(f *os.File) (string, error) {
	b, err := io.ReadAll(io.NewSectionReader(f, 0, maxIdentity))
	return string(b), err
}

// replace sets the content of f in place: it is mounted, so it cannot be renamed over.
func replace(f *os.File, content string) error {
	if _, err := f.WriteAt([]byte(content), 0); err != nil {
		return err
	}
	return f.Truncate(int64(len(content)))
}

func (f *identityFiles) setHostname(name string) error {
	if err := replace(f.hostname, name+"\n"); err != nil {
		return err
	}
	old, err := content(f.hosts)
	if err != nil {
		return err
	}
	return replace(f.hosts, hostsWith(old, name))
}

// checkHostname refuses what would break the files that a host name is written to.
func checkHostname(name string) error {
	if name == "" || len(name) > 64 || strings.ContainsAny(name, " \t\r\n#\x00") {
		return fmt.Errorf("%q is not a host name", name)
	}
	return nil
}

// hostsWith returns hosts with name as one of the machine's own names.
func hostsWith(hosts, name string) string {
	var b bytes.Buffer
	for line := range strings.Lines(hosts) {
		line = strings.TrimSuffix(line, "\n")
		if !strings.HasSuffix(line, hostsMark) {
			b.WriteString(line + "\n")
		}
	}
	b.WriteString("127.0.1.1\t" + name + " " + hostsMark + "\n")
	return b.String()
}

func (f *identityFiles) setMachineID(id string) error {
	if len(id) != 32 || strings.Trim(id, "0123456789abcdef") != "" {
		return fmt.Errorf("%q is not 32 lower-case hexadecimal digits", id)
	}
	return replace(f.machineID, id+"\n")
}

func (f *identityFiles) setNameservers(servers []string) error {
	var b strings.Builder
	for _, s := range servers {
		addr, err := netip.ParseAddr(s)
		if err != nil {
			return err
		}
		b.WriteString("nameserver " + addr.String() + "\n")
	}
	return replace(f.resolvConf, b.String())
}
