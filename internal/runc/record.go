package runc

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cubesandbox/cubelet/internal/vmm"
)

const recordFile = "owner"

// writeRecord saves who owns a slot, before the slot is used. It need only survive
// the daemon, not the host: after a boot there is no slot. So the file is replaced in
// one step but not synced.
func writeRecord(dir string, in vmm.Instance) error {
	data, err := json.Marshal(in)
	if err != nil {
		return fmt.Errorf("encode slot record: %w", err)
	}
	path := filepath.Join(dir, recordFile)
	if err := os.WriteFile(path+".new", data, 0o600); err != nil {
		return fmt.Errorf("write slot record: %w", err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("write slot record: %w", err)
	}
	return nil
}

func readRecord(dir string) (vmm.Instance, error) {
	data, err := os.ReadFile(filepath.Join(dir, recordFile))
	if err != nil {
		return vmm.Instance{}, fmt.Errorf("read slot record: %w", err)
	}
	var in vmm.Instance
	if err := json.Unmarshal(data, &in); err != nil {
		return vmm.Instance{}, fmt.Errorf("decode slot record: %w", err)
	}
	return in, nil
}
