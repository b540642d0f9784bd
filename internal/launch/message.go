// Package launch carries one launch order to a waiting vmm-launcher: the arguments,
// the environment and the open files of the program that the launcher becomes.
//
// The protocol is one SOCK_SEQPACKET connection. The commander sends one packet, a
// JSON Message with the files as SCM_RIGHTS. The launcher answers with the packet
// "exec" when the files are in place and then calls execve, which closes the
// connection: "exec" followed by end of file is success. Any other packet is the
// text of an error. The package is linked into the launcher, so it stays small: no
// net, no cube, no goroutine of its own.
package launch

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
)

// Bounds of one message.
const (
	// MaxFiles is the number of files that one message can carry. Twice as many
	// plus a few stay below 64, the size of a process's first descriptor table:
	// growing it costs an RCU grace period, about 10 ms.
	MaxFiles = 28
	// MaxMessage is the size of an encoded message in bytes.
	MaxMessage = 64 << 10
)

// Message is one order to execute a program.
type Message struct {
	Args []string `json:"args"` // Args[0] is the absolute path of the program
	Env  []string `json:"env"`  // the complete environment, KEY=value
	FDs  []int    `json:"fds"`  // the i-th file sent becomes descriptor FDs[i]
}

// Decode parses a message that came with the given number of files and checks
// everything that the launcher relies on.
func Decode(data []byte, files int) (Message, error) {
	var m Message
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&m); err != nil {
		return Message{}, fmt.Errorf("decode message: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return Message{}, errors.New("decode message: data after the message")
	}
	if len(m.FDs) != files {
		return Message{}, fmt.Errorf("message names %d files, %d came with it", len(m.FDs), files)
	}
	if err := m.check(); err != nil {
		return Message{}, err
	}
	return m, nil
}

func (m Message) encode() ([]byte, error) {
	if err := m.check(); err != nil {
		return nil, err
	}
	data, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode message: %w", err)
	}
	if len(data) > MaxMessage {
		return nil, fmt.Errorf("message of %d bytes is larger than %d", len(data), MaxMessage)
	}
	return data, nil
}

func (m Message) check() error {
	if len(m.Args) == 0 || !filepath.IsAbs(m.Args[0]) {
		return errors.New("args[0] must be an absolute path")
	}
	for i, s := range m.Args {
		if strings.ContainsRune(s, 0) {
			return fmt.Errorf("args[%d] contains a NUL byte", i)
		}
	}
	for i, s := range m.Env {
		if strings.ContainsRune(s, 0) || strings.IndexByte(s, '=') < 1 {
			return fmt.Errorf("env[%d] is not KEY=value", i)
		}
	}
	if len(m.FDs) > MaxFiles {
		return fmt.Errorf("%d files, at most %d are possible", len(m.FDs), MaxFiles)
	}
	var used [MaxFiles]bool
	for i, fd := range m.FDs {
		if fd < 0 || fd >= MaxFiles {
			return fmt.Errorf("fds[%d] is %d, outside 0 to %d", i, fd, MaxFiles-1)
		}
		if used[fd] {
			return fmt.Errorf("fds[%d]: descriptor %d is named twice", i, fd)
		}
		used[fd] = true
	}
	return nil
}
