package networkagent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
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

// records keeps the records of one node. Names that begin with a dot are unfinished.
type records struct {
	dir   string
	links string // what the name of every slot begins with
}

// checkOwner refuses names that are no good file name.
func checkOwner(owner string) error {
	const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"
	if owner == "" || len(owner) > 128 || owner[0] == '.' || strings.Trim(owner, letters) != "" {
		return cube.InvalidField("owner", "%q cannot own a network slot", owner)
	}
	return nil
}

func (d records) put(owner string, r record) error {
	b, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("record network slot of %s: %w", owner, err)
	}
	unfinished := filepath.Join(d.dir, "."+owner)
	if err := os.WriteFile(unfinished, b, 0o600); err != nil {
		return fmt.Errorf("record network slot of %s: %w", owner, err)
	}
	if err := os.Rename(unfinished, filepath.Join(d.dir, owner)); err != nil {
		return fmt.Errorf("record network slot of %s: %w", owner, err)
	}
	return nil
}

func (d records) remove(owner string) error {
	err := os.Remove(filepath.Join(d.dir, owner))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove network record of %s: %w", owner, err)
	}
	return nil
}

// list reads all records. One that cannot be read has no slot: its owner is known, so
// that it can be released.
func (d records) list() (map[string]record, error) {
	entries, err := os.ReadDir(d.dir)
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
	b, err := os.ReadFile(filepath.Join(d.dir, owner))
	if err != nil {
		return record{}
	}
	return d.parse(b)
}

// parse decodes a record. Its slot will be destroyed one day, so that a name which is
// not of this node's slots counts for none.
func (d records) parse(b []byte) record {
	var r record
	if err := json.Unmarshal(b, &r); err != nil {
		return record{}
	}
	number, ok := strings.CutPrefix(r.Slot, d.links)
	if _, err := strconv.ParseUint(number, 10, 32); !ok || err != nil {
		return record{}
	}
	if slices.ContainsFunc(r.Guests, func(a netip.Addr) bool { return !a.Is4() }) {
		return record{}
	}
	return r
}

// sweep removes records that a crash left unfinished.
func (d records) sweep() error {
	unfinished, err := filepath.Glob(filepath.Join(d.dir, ".*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, p := range unfinished {
		errs = append(errs, os.Remove(p))
	}
	return errors.Join(errs...)
}
