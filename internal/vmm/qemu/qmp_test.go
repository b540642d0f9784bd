package qemu

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	cube "github.com/cubesandbox/cubelet"
)

const greeting = `{"QMP": {"version": {"qemu": {"major": 10}}, "capabilities": []}}`

// fakeMonitor greets, answers qmp_capabilities, and then the one command that follows
// with the lines; %s in them is the command's id. It hangs up after them unless hold.
type fakeMonitor struct {
	greeting string
	lines    []string
	hold     bool
}

func (f fakeMonitor) serve(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "m")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() {
		_ = l.Close()
		<-done
	})
	go func() {
		defer close(done)
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		in := bufio.NewReader(conn)
		fmt.Fprintln(conn, f.greeting)
		fmt.Fprintf(conn, `{"return": {}, "id": %q}`+"\n", readID(in))
		id := readID(in)
		for _, line := range f.lines {
			fmt.Fprintln(conn, strings.ReplaceAll(line, "%s", id))
		}
		if f.hold {
			_, _ = in.ReadByte() // until the client hangs up
		}
	}()
	return path
}

func readID(in *bufio.Reader) string {
	var cmd struct{ ID string }
	line, _ := in.ReadBytes('\n')
	_ = json.Unmarshal(line, &cmd)
	return cmd.ID
}

func TestExecuteFindsItsAnswer(t *testing.T) {
	tests := map[string]struct {
		lines []string
		text  string // of the error, empty when none
	}{
		"plain":          {[]string{`{"return": {"status": "running"}, "id": "%s"}`}, ""},
		"after events":   {[]string{`{"event": "STOP"}`, `{"event": "RESUME", "data": {}}`, `{"return": {"status": "running"}, "id": "%s"}`}, ""},
		"refused":        {[]string{`{"error": {"class": "GenericError", "desc": "no such thing"}, "id": "%s"}`}, "no such thing"},
		"other id":       {[]string{`{"return": {}, "id": "77"}`}, `answers "77"`},
		"wrong shape":    {[]string{`{"return": [], "id": "%s"}`}, "unexpected answer"},
		"greets again":   {[]string{greeting}, "answers \"\""},
		"not JSON":       {[]string{"hello"}, "malformed message"},
		"two kinds":      {[]string{`{"return": {}, "event": "X", "id": "%s"}`}, "2 kinds"},
		"hangs up":       {nil, "QEMU is gone"},
		"endless events": {strings.Split(strings.Repeat(`{"event": "X"}`+"\n", maxEvents+2), "\n"), "events and no answer"},
		"endless line":   {[]string{strings.Repeat("x", maxMessage+1)}, "token too long"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			c, err := dialQMP(t.Context(), fakeMonitor{greeting: greeting, lines: test.lines}.serve(t))
			if err != nil {
				t.Fatal(err)
			}
			defer c.close()
			status, err := queryStatus(t.Context(), c)
			if test.text == "" {
				if err != nil || status != "running" {
					t.Errorf("status = %q, %v", status, err)
				}
			} else if err == nil || !strings.Contains(err.Error(), test.text) {
				t.Errorf("error = %v; want %q", err, test.text)
			}
		})
	}
}

func TestDialRefusesWhatIsNoMonitor(t *testing.T) {
	if _, err := dialQMP(t.Context(), fakeMonitor{greeting: `{"return": {}}`}.serve(t)); err == nil || !strings.Contains(err.Error(), "greet") {
		t.Errorf("dial = %v", err)
	}
}

func TestACallEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	c, err := dialQMP(ctx, fakeMonitor{greeting: greeting, hold: true}.serve(t))
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	if _, err := queryStatus(ctx, c); cube.CodeOf(err) != cube.CodeDeadlineExceeded {
		t.Errorf("status = %v; want DeadlineExceeded", err)
	}
}

func TestMigrationEndsByEvent(t *testing.T) {
	event := func(status string) string {
		return fmt.Sprintf(`{"event": "MIGRATION", "data": {"status": %q}}`, status)
	}
	done := `{"return": {}, "id": "%s"}`
	for name, test := range map[string]struct {
		lines []string
		text  string
	}{
		"completed": {[]string{event("setup"), done, event("active"), `{"event": "STOP"}`, event("completed")}, ""},
		"failed":    {[]string{done, event("failed"), `{"return": {"error-desc": "bad section"}, "id": "3"}`}, "failed: bad section"},
		"gone":      {[]string{done, event("active")}, "QEMU is gone"},
		"odd data":  {[]string{done, `{"event": "MIGRATION", "data": 7}`, event("completed")}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			c, err := dialQMP(t.Context(), fakeMonitor{greeting: greeting, lines: test.lines, hold: name == "failed"}.serve(t))
			if err != nil {
				t.Fatal(err)
			}
			defer c.close()
			if err := c.execute(t.Context(), call{name: "migrate"}); err != nil {
				t.Fatal(err)
			}
			err = awaitMigration(t.Context(), c)
			if (err == nil) != (test.text == "") || err != nil && !strings.Contains(err.Error(), test.text) {
				t.Errorf("migration = %v; want %q", err, test.text)
			}
		})
	}
}

func TestControlOfWhatDoesNotRunIsTyped(t *testing.T) {
	dir := t.TempDir()
	jail := &testJail{slots: map[string]*testSlot{}}
	d := &Driver{jail: jail, runDir: dir}
	if err := d.Pause(t.Context(), "sbx-1"); !cube.IsNotFound(err) {
		t.Errorf("pause without a slot = %v; want NotFound", err)
	}
	jail.slots["sbx-1"] = &testSlot{}
	jail.slots["sbx-1"].inst.Owner = "sbx-1"
	if err := d.Pause(t.Context(), "sbx-1"); cube.CodeOf(err) != cube.CodeFailedPrecondition {
		t.Errorf("pause before launch = %v; want FailedPrecondition", err)
	}
}

func TestSweepRemovesOnlyFilesWithoutASlot(t *testing.T) {
	dir := t.TempDir()
	jail := &testJail{slots: map[string]*testSlot{"alive": {}}}
	jail.slots["alive"].inst.Owner = "alive"
	for _, name := range []string{"alive.qmp", "alive.log", "gone.qmp", "gone.log", "other"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	d := &Driver{jail: jail, runDir: dir, log: discardLog()}
	if err := d.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(dir)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if got := strings.Join(names, " "); err != nil || got != "alive.log alive.qmp other" {
		t.Errorf("left: %s, %v", got, err)
	}
}

func TestStateHeadersAreChecked(t *testing.T) {
	for text, want := range map[string]string{
		"QEVM\x00\x00\x00\x03rest": "",
		"QEVM\x00\x00\x00\x04rest": "format 4",
		"QEVM":                     "shorter",
		"":                         "shorter",
		"#!/bin/sh":                "not a QEMU",
	} {
		err := checkStateHeader(strings.NewReader(text))
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("header %q: %v; want %q", text, err, want)
		}
	}
}

func FuzzDecodeQMP(f *testing.F) {
	for _, line := range []string{
		greeting, `{"return": {}, "id": "1"}`, `{"error": {"class": "X", "desc": "y"}, "id": "2"}`,
		`{"event": "STOP", "data": {"a": [1]}, "timestamp": {"seconds": 1}}`, `{}`, `[]`, `{"id": 3}`, `{"return": null}`,
	} {
		f.Add([]byte(line))
	}
	f.Fuzz(func(t *testing.T, line []byte) {
		m, err := decodeQMP(line)
		if err != nil {
			return
		}
		kinds := 0
		for _, set := range []bool{m.Greeting != nil, m.Return != nil, m.Error != nil, m.Event != nil} {
			if set {
				kinds++
			}
		}
		if kinds != 1 {
			t.Errorf("%d kinds from %q", kinds, line)
		}
		if m.Event != nil && len(m.Event.Data) > 0 && !json.Valid(m.Event.Data) {
			t.Errorf("event data %q", m.Event.Data)
		}
	})
}

func TestRefusalsKeepTheirClass(t *testing.T) {
	err := fmt.Errorf("pause: %w", &qmpError{Class: "GenericError", Desc: "no"})
	var refused *qmpError
	if !errors.As(err, &refused) || refused.Class != "GenericError" {
		t.Errorf("%v lost its class", err)
	}
}
