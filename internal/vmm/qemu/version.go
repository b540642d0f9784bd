package qemu

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"strconv"
	"strings"

	cube "github.com/cubesandbox/cubelet"
)

// MinVersion is the oldest QEMU that works: the first one with the migration URI file:
// and with accel=kvm,device=.
const MinVersion = "8.2"

// Version asks the program for its version and refuses one older than MinVersion.
// Codes: FailedPrecondition.
func Version(ctx context.Context, binary string) (string, error) {
	cmd := exec.CommandContext(ctx, binary, "--version")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", cube.Errorf(cube.CodeFailedPrecondition, "run %s --version: %w %s", binary, err, bytes.TrimSpace(stderr.Bytes())).
			WithHint("Install QEMU %s or newer (Debian: qemu-system-x86, on Debian 12 from backports).", MinVersion)
	}
	version, err := parseVersion(string(out))
	if err != nil {
		return "", cube.Errorf(cube.CodeFailedPrecondition, "%s --version: %w", binary, err)
	}
	if older(version, MinVersion) {
		return "", cube.Errorf(cube.CodeFailedPrecondition, "%s is QEMU %s, and %s is the oldest that works", binary, version, MinVersion).
			WithHint("Install QEMU %s or newer (Debian 12: from backports).", MinVersion)
	}
	return version, nil
}

// parseVersion returns the version in QEMU's first line of output, such as
// "QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)".
func parseVersion(out string) (string, error) {
	line, _, _ := strings.Cut(out, "\n")
	_, rest, ok := strings.Cut(line, "version ")
	if !ok {
		return "", fmt.Errorf("no version in %.100q", line)
	}
	version, _, _ := strings.Cut(strings.TrimSpace(rest), " ")
	if numbers := versionNumbers(version); len(numbers) < 2 {
		return "", fmt.Errorf("%.100q is not a version", version)
	}
	return version, nil
}

// older reports whether version a comes before b.
func older(a, b string) bool {
	x, y := versionNumbers(a), versionNumbers(b)
	for i := range max(len(x), len(y)) {
		var m, n int
		if i < len(x) {
			m = x[i]
		}
		if i < len(y) {
			n = y[i]
		}
		if m != n {
			return m < n
		}
	}
	return false
}

// versionNumbers returns the leading dotted numbers of a version: 9.1.0-rc2 is 9, 1, 0.
func versionNumbers(version string) []int {
	var numbers []int
	for part := range strings.SplitSeq(version, ".") {
		digits := part
		if end := strings.IndexFunc(part, func(r rune) bool { return r < '0' || r > '9' }); end >= 0 {
			digits = part[:end]
		}
		n, err := strconv.Atoi(digits)
		if err != nil {
			return numbers
		}
		numbers = append(numbers, n)
		if digits != part {
			return numbers
		}
	}
	return numbers
}
