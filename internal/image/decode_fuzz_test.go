package image

import (
	"strings"
	"testing"
)

// FuzzDecoders: what comes out of the decoders of outside bytes is within its bounds.
func FuzzDecoders(f *testing.F) {
	f.Add([]byte(`{"schemaVersion":2,"manifests":[{"digest":"sha256:x","size":1}]}`))
	f.Add([]byte(`[{"Config":"c","RepoTags":["a"],"Layers":["l"]}]`))
	f.Add([]byte(`{"auths":{"https://registry.test/v1/":{"auth":"bWU6c2VjcmV0"}},"credHelpers":{"a":"b"},"credsStore":"s"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if m, err := decodeManifest(b); err == nil {
			for _, l := range m.Layers {
				if l.Digest.Validate() != nil || l.Size < 0 {
					t.Errorf("layer %+v", l)
				}
			}
		}
		if images, err := decodeDockerArchive(b); err == nil && len(images) == 0 {
			t.Error("no image and no error")
		}
		if c, err := decodeConfig(b, 1); err == nil && len(c.RootFS.DiffIDs) != 1 {
			t.Error("wrong number of layers")
		}
		_, _ = decodeIndex(b)
		if c, err := decodeDockerConfig(b); err == nil {
			_ = c.helper("registry.test")
			_, _, _ = c.auth("registry.test")
		}
		if parts, err := splitPath(string(b)); err == nil {
			for _, p := range parts {
				if p == "" || p == "." || p == ".." || len(p) > 255 || strings.ContainsAny(p, "/\x00") {
					t.Errorf("part %q of %q", p, b)
				}
			}
		}
	})
}
