package daemon

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"

	cube "github.com/cubesandbox/cubelet"
)

// agentVersion identifies the guest agent by its content: a memory image holds the
// agent that ran when it was taken.
func agentVersion(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", cube.Errorf(cube.CodeFailedPrecondition, "guest agent: %w", err).WithHint("build it with `make build`, or give --libexec")
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", fmt.Errorf("read guest agent: %w", err)
	}
	return hex.EncodeToString(h.Sum(nil))[:12], nil
}

// findTool returns the absolute path of a program.
func findTool(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return "", cube.Errorf(cube.CodeFailedPrecondition, "%s is not installed", name).WithHint("run scripts/install-deps; `cubelet doctor` lists what is needed")
	}
	return filepath.Abs(path)
}
