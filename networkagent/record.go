package networkagent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	cube "github.com/cubesandbox/cubelet"
)

// record tells which slot an owner has. It is a file named after the owner, written
// before the slot is handed out and removed when the slot is gone. It need not survive
// a power failure, since no namespace does.
type record struct {
	Slot string `json:"slot"`
	// Guests are the addresses that the guest may have.
	Guests []netip.Addr `json:"guests"`
}

// records keeps the records of one RunDir. Names that begin with a dot are unfinished.
type records string

func checkOwner(owner string) error {
	if !regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$`).MatchString(owner) {
		return cube.InvalidField("owner", "%q cannot own a network slot", owner)
	}
	return nil
}

func (d records) put(owner string, r record) error {
	b, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("record network slot of %s: %w", owner, err)
	}
	unfinished := filepath.Join(string(d), "."+owner)
	if err := os.WriteFile(unfinished, b, 0o600); err != nil {
		return fmt.Errorf("record network slot of %s: %w", owner, err)
	}
	if err := os.Rename(unfinished, filepath.Join(string(d), owner)); err != nil {
		return fmt.Errorf("record network slot of %s: %w", owner, err)
	}
	return nil
}

func (d records) remove(owner string) error {
	err := os.Remove(filepath.Join(string(d), owner))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove network record of %s: %w", owner, err)
	}
	return nil
}

// list reads all records. One that cannot be read has no slot: its owner is known, so
// that it can be released.
func (d records) list() (map[string]record, error) {
	entries, err := os.ReadDir(string(d))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list network records: %w", err)
	}
	all := map[string]record{}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") {
			continue
		}
		all[e.Name()] = d.read(e.Name())
	}
	return all, nil
}

func (d records) read(owner string) record {
	b, err := os.ReadFile(filepath.Join(string(d), owner))
	if err != nil {
		return record{}
	}
	var r record
	if json.Unmarshal(b, &r) != nil || r.Slot != filepath.Base(r.Slot) {
		return record{}
	}
	return r
}

// sweep removes records that a crash left unfinished.
func (d records) sweep() error {
	unfinished, err := filepath.Glob(filepath.Join(string(d), ".*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, p := range unfinished {
		errs = append(errs, os.Remove(p))
	}
	return errors.Join(errs...)
}
