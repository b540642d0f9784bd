package image

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	cube "github.com/cubesandbox/cubelet"
)

// dockerConfig is the part of docker's config.json that tells credentials.
type dockerConfig struct {
	Auths       map[string]dockerAuth `json:"auths"`
	CredsStore  string                `json:"credsStore"`
	CredHelpers map[string]string     `json:"credHelpers"`
}

type dockerAuth struct {
	Username      string `json:"username"`
	Password      string `json:"password"`
	Auth          string `json:"auth"` // base64 of user:password
	IdentityToken string `json:"identitytoken"`
}

// helperName is what a credential helper may be called: it becomes part of a program's
// name that is looked up in PATH.
var helperName = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9._-]*$`)

func decodeDockerConfig(b []byte) (dockerConfig, error) {
	var c dockerConfig
	if err := json.Unmarshal(b, &c); err != nil {
		return c, err
	}
	return c, nil
}

// credentials returns the user and secret for a registry host, both empty when there are
// none. An empty user means that the secret is a token.
func (s *Store) credentials(ctx context.Context, host string) (user, secret string, err error) {
	path := s.dockerConfig
	if path == "" {
		path = dockerConfigPath()
	}
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", "", nil
	}
	if err != nil {
		return "", "", err
	}
	c, err := decodeDockerConfig(b)
	if err != nil {
		return "", "", cube.Errorf(cube.CodeFailedPrecondition, "docker configuration %s: %w", path, err)
	}
	if helper := c.helper(host); helper != "" {
		return runHelper(ctx, helper, host)
	}
	user, secret, err = c.auth(host)
	if err != nil {
		return "", "", cube.Errorf(cube.CodeFailedPrecondition, "docker configuration %s: %w", path, err)
	}
	return user, secret, nil
}

func dockerConfigPath() string {
	dir := os.Getenv("DOCKER_CONFIG")
	if dir == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			home = "/root" // a daemon may have no HOME
		}
		dir = filepath.Join(home, ".docker")
	}
	return filepath.Join(dir, "config.json")
}

func (c dockerConfig) helper(host string) string {
	for key, helper := range c.CredHelpers {
		if registryHost(key) == host {
			return helper
		}
	}
	return c.CredsStore
}

func (c dockerConfig) auth(host string) (user, secret string, err error) {
	for key, a := range c.Auths {
		if registryHost(key) != host {
			continue
		}
		switch {
		case a.IdentityToken != "":
			return "", a.IdentityToken, nil
		case a.Auth == "":
			return a.Username, a.Password, nil
		}
		plain, err := base64.StdEncoding.DecodeString(a.Auth)
		if err != nil {
			return "", "", fmt.Errorf("credentials of %s: %w", host, err)
		}
		user, secret, ok := strings.Cut(strings.TrimRight(string(plain), "\x00"), ":")
		if !ok {
			return "", "", fmt.Errorf("credentials of %s are not user:password", host)
		}
		return user, secret, nil
	}
	return "", "", nil
}

// registryHost takes the host of a key, which may be a URL.
func registryHost(key string) string {
	if _, rest, ok := strings.Cut(key, "://"); ok {
		key = rest
	}
	host, _, _ := strings.Cut(key, "/")
	return host
}

// runHelper asks one of docker's credential helpers.
func runHelper(ctx context.Context, helper, host string) (user, secret string, err error) {
	if !helperName.MatchString(helper) {
		return "", "", cube.Errorf(cube.CodeFailedPrecondition, "docker configuration: no credential helper can be called %q", helper)
	}
	cmd := exec.CommandContext(ctx, "docker-credential-"+helper, "get")
	cmd.Stdin = strings.NewReader(host)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	text := strings.TrimSpace(string(out) + stderr.String())
	if err != nil && strings.Contains(text, "credentials not found") {
		return "", "", nil
	}
	if err != nil {
		return "", "", cube.Errorf(cube.CodeFailedPrecondition, "credential helper %s: %w: %.200s", helper, err, text)
	}
	var reply struct{ Username, Secret string }
	if err := json.Unmarshal(out, &reply); err != nil {
		return "", "", cube.Errorf(cube.CodeFailedPrecondition, "credential helper %s: %w", helper, err)
	}
	if reply.Username == "<token>" {
		reply.Username = ""
	}
	return reply.Username, reply.Secret, nil
}
