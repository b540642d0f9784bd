package boot

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
)

// etcFiles writes the files that say who a machine is, below root.
type etcFiles struct{ root string }

const hostsDefault = `127.0.0.1	localhost
::1	localhost ip6-localhost ip6-loopback
`

// hostsMark ends the line of /etc/hosts that is the agent's.
const hostsMark = "# cube"

// ensure gives an image that has no /etc/hosts one.
func (e etcFiles) ensure() error {
	if b, err := os.ReadFile(e.path("hosts")); err == nil && len(bytes.TrimSpace(b)) > 0 {
		return nil
	}
	return e.write("hosts", hostsDefault, 0o644)
}

func (e etcFiles) path(name string) string { return filepath.Join(e.root, "etc", name) }

// write sets the content of a file. One that has it already is left alone, and a link,
// which may lead to a service that does not run here, is replaced by a file.
func (e etcFiles) write(name, content string, mode fs.FileMode) error {
	path := e.path(name)
	st, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
	case err != nil:
		return err
	case !st.Mode().IsRegular():
		if err := os.Remove(path); err != nil {
			return err
		}
	default:
		if old, err := os.ReadFile(path); err == nil && string(old) == content {
			return nil
		}
	}
	return os.WriteFile(path, []byte(content), mode)
}

func (e etcFiles) setHostname(name string) error {
	if name == "" || len(name) > 64 || strings.ContainsAny(name, " \t\n#") {
		return fmt.Errorf("%q is not a host name", name)
	}
	if err := e.write("hostname", name+"\n", 0o644); err != nil {
		return err
	}
	old, err := os.ReadFile(e.path("hosts"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return e.write("hosts", hostsWith(string(old), name), 0o644)
}

// hostsWith returns hosts with name as one of the machine's own names.
func hostsWith(hosts, name string) string {
	if strings.TrimSpace(hosts) == "" {
		hosts = hostsDefault
	}
	var b strings.Builder
	for line := range strings.Lines(hosts) {
		line = strings.TrimSuffix(line, "\n")
		if !strings.HasSuffix(line, hostsMark) {
			b.WriteString(line + "\n")
		}
	}
	fmt.Fprintf(&b, "127.0.1.1\t%s %s\n", name, hostsMark)
	return b.String()
}

func (e etcFiles) setMachineID(id string) error {
	if len(id) != 32 || strings.Trim(id, "0123456789abcdef") != "" {
		return fmt.Errorf("%q is not 32 lower-case hexadecimal digits", id)
	}
	return e.write("machine-id", id+"\n", 0o444)
}

func (e etcFiles) setNameservers(servers []string) error {
	var b strings.Builder
	for _, s := range servers {
		addr, err := netip.ParseAddr(s)
		if err != nil {
			return err
		}
		fmt.Fprintf(&b, "nameserver %s\n", addr)
	}
	return e.write("resolv.conf", b.String(), 0o644)
}
