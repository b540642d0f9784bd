package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"

	cube "github.com/cubesandbox/cubelet"
)

func TestSizes(t *testing.T) {
	for text, want := range map[string]mib{
		"512": 512, "512MiB": 512, "512 MB": 512, "1GiB": 1024, "1g": 1024, "1.5G": 1536, "1TiB": 1 << 20, " 64m ": 64,
	} {
		var m mib
		if err := m.Set(text); err != nil || m != want {
			t.Errorf("%q: %d, %v", text, m, err)
		}
	}
	for _, text := range []string{"", "0", "-1", "1KiB", "1.3", "x", "1e400", "NaN", "Inf", "5000TiB", "1 G B", "0x10"} {
		var m mib
		if err := m.Set(text); err == nil {
			t.Errorf("%q is %d", text, m)
		}
	}
}

func TestPlaces(t *testing.T) {
	for text, want := range map[string]place{
		"s1:/a":     {"s1", "/a"},
		"s1:a:b":    {"s1", "a:b"},
		"s1:":       {"s1", ""},
		"/a:b":      {"", "/a:b"},
		"./a:b":     {"", "./a:b"},
		"../a:b":    {"", "../a:b"},
		"dir/a:b":   {"", "dir/a:b"},
		"file":      {"", "file"},
		"-":         {"", "-"},
		":x":        {"", ":x"},
		"s1:../etc": {"s1", "../etc"},
	} {
		if got := parsePlace(text); got != want {
			t.Errorf("%q: %+v", text, got)
		}
	}
}

func TestLinksOfAGuestLeadNowhereElse(t *testing.T) {
	dir := t.TempDir()
	for i, tt := range []struct {
		name, target, want string // want is empty when the link is refused
	}{
		{"a", "/src/b", "b"},
		{"sub/a", "/src/b", "../b"},
		{"sub/a", "/src/sub/b", "b"},
		{"a", "b", "b"},
		{"a", "/etc/passwd", ""},
		{"a", "/src", ""},
		{"a", "/src/../etc", ""},
		{"a", "/srcx/b", ""},
		{"a", "../../etc", ""},
		{"sub/a", "../../x", ""},
	} {
		into := filepath.Join(dir, fmt.Sprint(i))
		if err := os.MkdirAll(filepath.Join(into, "sub"), 0o700); err != nil {
			t.Fatal(err)
		}
		root, err := os.OpenRoot(into)
		if err != nil {
			t.Fatal(err)
		}
		err = (&tree{root: root, base: "/src"}).link(tt.name, tt.target)
		_ = root.Close()
		got, _ := os.Readlink(filepath.Join(into, tt.name))
		if got != tt.want || (err == nil) != (tt.want != "") {
			t.Errorf("%s to %s: %q, %v", tt.name, tt.target, got, err)
		}
	}
}

func TestNamesOfAGuestAreOneEntry(t *testing.T) {
	for _, name := range []string{"", ".", "..", "a/b", "/", "a\x00"} {
		if checkName(name) == nil {
			t.Errorf("%q is taken", name)
		}
	}
	for _, name := range []string{"a", "...", "-", "a b", "\xff"} {
		if err := checkName(name); err != nil {
			t.Error(err)
		}
	}
}

func TestCleanWriterKeepsCharactersThatWritesCut(t *testing.T) {
	var b bytes.Buffer
	w := &cleanWriter{w: &b}
	for _, c := range []byte("é\x1b[2J€\r\nx😀\n") {
		if n, err := w.Write([]byte{c}); n != 1 || err != nil {
			t.Fatal(n, err)
		}
	}
	if got := strings.ReplaceAll(b.String(), "\uFFFD", "?"); got != "é?[2J€?\nx😀\n" {
		t.Errorf("%q", got)
	}
}

func TestProgressOnATerminalFitsTheLine(t *testing.T) {
	var b bytes.Buffer
	p := &progress{w: &b, width: 60}
	p.update(strings.Repeat("long ", 50), "a", 1, 4)
	p.update("second", "b", 4, 4)
	p.close()
	for l := range strings.SplitSeq(b.String(), "\n") {
		l = strings.TrimPrefix(l, "\r\x1b[K")
		if n := len([]rune(l)); n > 59 {
			t.Errorf("%d characters: %q", n, l)
		}
	}
	if !strings.Contains(b.String(), "second  [====================] 100%  4 B / 4 B\n") {
		t.Errorf("%q", b.String())
	}
}

func TestExitCodesAreThoseOfTheHelp(t *testing.T) {
	for _, tt := range []struct {
		err  error
		want int
	}{
		{nil, 0},
		{errors.New("x"), 1},
		{&usageError{nil, errors.New("x")}, 2},
		{badFlag("f", "x"), 2},
		{cube.InvalidField("f", "x"), 2},
		{during("get", connect.NewError(connect.CodeNotFound, errors.New("x"))), 3},
		{connect.NewError(connect.CodeResourceExhausted, errors.New("x")), 6},
		{connect.NewError(connect.CodeAborted, errors.New("x")), 5},
		{connect.NewError(connect.CodeUnauthenticated, errors.New("x")), 9},
		{connect.NewError(connect.CodeInternal, errors.New("x")), 1},
		{&coded{connect.NewError(connect.CodeNotFound, errors.New("x")), 125}, 125},
		{&exitError{42}, 42},
		{fmt.Errorf("open: %w", os.ErrNotExist), 1},
	} {
		var code int
		var usage *usageError
		if errors.As(tt.err, &usage) {
			code = exitCode(tt.err)
		} else {
			code = report(&bytes.Buffer{}, tt.err)
		}
		if code != tt.want {
			t.Errorf("%v: %d", tt.err, code)
		}
	}
	seen := map[int]bool{}
	for _, m := range exitCodes() {
		if seen[m.code] {
			t.Errorf("%d has two meanings", m.code)
		}
		seen[m.code] = true
	}
}

func FuzzFileErrorsOfAGuest(f *testing.F) {
	f.Add([]byte(`{"code":404,"message":"x"}`), 404)
	f.Add([]byte(`{"code":"not_found","message":"x","details":[{"type":"cube.v1.ErrorDetail","value":"CgV4"}]}`), 404)
	f.Add([]byte("<html>"), 502)
	f.Fuzz(func(t *testing.T, body []byte, status int) {
		err := fileError(response(body, status))
		if err == nil || strings.ContainsRune(describe(err), '\x1b') {
			t.Errorf("error %v", err)
		}
	})
}

func response(body []byte, status int) *http.Response {
	return &http.Response{StatusCode: status, Status: fmt.Sprint(status), Body: io.NopCloser(bytes.NewReader(body))}
}
