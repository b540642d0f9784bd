package cli

import (
	"bufio"
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	cube "github.com/cubesandbox/cubelet"
)

func sortedKeys(m map[string]string) []string { return slices.Sorted(maps.Keys(m)) }

// mib is a flag for a size in MiB: a plain number, or one with a unit.
type mib uint32

// String implements pflag.Value.
func (m *mib) String() string { return strconv.FormatUint(uint64(*m), 10) }

// Type implements pflag.Value.
func (m *mib) Type() string { return "size" }

// Set implements pflag.Value.
func (m *mib) Set(s string) error {
	text := strings.ToLower(strings.TrimSpace(s))
	number := strings.TrimRight(text, "abcdefghijklmnopqrstuvwxyz ")
	perUnit := map[string]float64{"": 1, "m": 1, "mb": 1, "mib": 1, "g": 1 << 10, "gb": 1 << 10, "gib": 1 << 10, "t": 1 << 20, "tb": 1 << 20, "tib": 1 << 20}
	unit, ok := perUnit[strings.TrimSpace(text[len(number):])]
	v, err := strconv.ParseFloat(number, 64)
	if err != nil || !ok {
		return fmt.Errorf("%q is not a size such as 512, 512MiB or 1GiB", s)
	}
	v *= unit
	if v < 1 || v > math.MaxUint32 || v != math.Trunc(v) {
		return fmt.Errorf("%q is not a whole number of MiB", s)
	}
	*m = mib(v)
	return nil
}

// environment joins the variables of --env-file and --env; the latter win. A name
// without value takes the value from cubecli's own environment.
func (a *app) environment(files, pairs []string) (map[string]string, error) {
	env := map[string]string{}
	for _, f := range files {
		if err := a.envFile(env, f); err != nil {
			return nil, &flagError{"env-file", err}
		}
	}
	for _, p := range pairs {
		if err := a.addEnv(env, p); err != nil {
			return nil, &flagError{"env", err}
		}
	}
	return env, nil
}

func (a *app) envFile(env map[string]string, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for n := 1; lines.Scan(); n++ {
		text := strings.TrimLeft(lines.Text(), " \t")
		if text == "" || strings.HasPrefix(text, "#") {
			continue
		}
		if err := a.addEnv(env, text); err != nil {
			return fmt.Errorf("%s, line %d: %w", path, n, err)
		}
	}
	return lines.Err()
}

func (a *app) addEnv(env map[string]string, pair string) error {
	name, value, ok := strings.Cut(pair, "=")
	if name == "" || strings.ContainsAny(name, " \t\x00") {
		return cube.Errorf(cube.CodeInvalid, "%q is not NAME=VALUE", pair)
	}
	if !ok {
		value = a.getenv(name)
	}
	env[name] = value
	return nil
}

// pairs parses repeated K=V flags.
func pairs(flag string, list []string) (map[string]string, error) {
	out := map[string]string{}
	for _, p := range list {
		k, v, ok := strings.Cut(p, "=")
		if !ok || k == "" {
			return nil, badFlag(flag, "%q is not KEY=VALUE", p)
		}
		out[k] = v
	}
	return out, nil
}

// jsonFlag parses a flag that holds JSON and says where a fault is.
func jsonFlag[T any](flag, text string, parse func([]byte) (T, error)) (T, error) {
	v, err := parse([]byte(text))
	if err == nil {
		return v, nil
	}
	var own *cube.Error
	if errors.As(err, &own) && (own.Field == flag || strings.HasPrefix(own.Field, flag+".")) {
		return v, where(text, err)
	}
	return v, &flagError{flag, where(text, err)}
}
