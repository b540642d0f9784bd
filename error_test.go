package cube_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"testing"

	cube "github.com/cubesandbox/cubelet"
)

func TestCodeOf(t *testing.T) {
	noSpace := &fs.PathError{Op: "write", Path: "/x", Err: syscall.ENOSPC}
	for _, tc := range []struct {
		name string
		err  error
		want cube.Code
	}{
		{"unclassified", errors.New("x"), cube.CodeInternal},
		{"no such file", os.ErrNotExist, cube.CodeInternal},
		{"deadline", fmt.Errorf("wait: %w", context.DeadlineExceeded), cube.CodeDeadlineExceeded},
		{"canceled", fmt.Errorf("wait: %w", context.Canceled), cube.CodeCanceled},
		{"disk full", fmt.Errorf("clone: %w", noSpace), cube.CodeNoSpace},
		{"quota", syscall.EDQUOT, cube.CodeNoSpace},
		{"own", cube.Errorf(cube.CodeNotFound, "x"), cube.CodeNotFound},
		{"own, wrapped", fmt.Errorf("get: %w", cube.Errorf(cube.CodeNotFound, "x")), cube.CodeNotFound},
		{"own around a cause", cube.Errorf(cube.CodeUnavailable, "x: %w", context.Canceled), cube.CodeUnavailable},
		{"the outermost wins", cube.Errorf(cube.CodeInvalid, "x: %w", cube.Errorf(cube.CodeNotFound, "y")), cube.CodeInvalid},
		{"joined", errors.Join(errors.New("undo"), cube.Errorf(cube.CodeAborted, "x")), cube.CodeAborted},
	} {
		if got := cube.CodeOf(tc.err); got != tc.want {
			t.Errorf("%s: %v, want %v", tc.name, got, tc.want)
		}
	}
	if cube.IsNotFound(nil) || !cube.IsNotFound(cube.Errorf(cube.CodeNotFound, "x")) {
		t.Error("IsNotFound")
	}
}

func TestErrorText(t *testing.T) {
	cause := errors.New("cause")
	for _, tc := range []struct {
		err  *cube.Error
		want string
	}{
		{&cube.Error{}, "internal"},
		{&cube.Error{Code: cube.CodeNotFound}, "not found"},
		{&cube.Error{Code: cube.CodeNotFound, Op: "delete sandbox", ID: "sb-1"}, "delete sandbox sb-1: not found"},
		{&cube.Error{Op: "create sandbox", Err: cause}, "create sandbox: cause"},
		{&cube.Error{ID: "sb-1", Err: cause}, "sb-1: cause"},
		{cube.InvalidField("network.cidr", "%d is bad", 7), "network.cidr: 7 is bad"},
		{cube.Errorf(cube.CodeInvalid, "x: %w", cause).WithHint("do %s", "that"), "x: cause"},
	} {
		if got := tc.err.Error(); got != tc.want {
			t.Errorf("%#v: %q, want %q", tc.err, got, tc.want)
		}
	}
	wrapped := cube.Errorf(cube.CodeInvalid, "x: %w", cause)
	if !errors.Is(wrapped, cause) {
		t.Error("the cause is lost")
	}
}

func TestWithHintLeavesTheOriginalAlone(t *testing.T) {
	plain := cube.Errorf(cube.CodeInvalid, "x")
	hinted := plain.WithHint("do %s", "that")
	if plain.Hint != "" || hinted.Hint != "do that" || hinted.Code != cube.CodeInvalid {
		t.Errorf("original %+v, copy %+v", plain, hinted)
	}
}

func TestEveryCodeHasAName(t *testing.T) {
	seen := map[string]bool{}
	for c := cube.CodeInternal; c <= cube.CodeAborted; c++ {
		if name := c.String(); name == "" || seen[name] {
			t.Errorf("code %d is named %q", int(c), name)
		} else {
			seen[name] = true
		}
	}
	for _, c := range []cube.Code{-1, cube.CodeAborted + 1} {
		if got, want := c.String(), fmt.Sprintf("code(%d)", int(c)); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
