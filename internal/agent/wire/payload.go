package wire

import (
	"encoding/binary"
	"errors"
)

// ErrMalformed is returned for a payload that does not decode.
var ErrMalformed = errors.New("malformed frame")

// Init is the payload of KindInit. Empty fields leave what the agent knows.
type Init struct {
	Token          string
	UnixNano       int64
	Env            map[string]string
	User, Workdir  string
	SandboxID      string
	TemplateID     string
	Hostname       string
	MachineID      string
	Entropy        []byte
	Address        string
	Gateway        string
	Nameservers    []string
	Entrypoint     []string
	Cmd            []string
	PresentedToken string // the token the agent has now; empty: Token
}

// Start is the payload of KindStart.
type Start struct {
	Token      string
	Args       []string
	Env        map[string]string
	Cwd        string
	User       string
	Stdin      bool
	PTY        bool
	Cols, Rows uint32
	TimeoutMs  int64 // 0: none
}

// End is the payload of KindEnd.
type End struct {
	Code   int32 // exit code, or the number of the signal
	Signal bool
	Core   bool
	Reason string // why the agent killed it
}

// Error is the payload of KindError.
type Error struct {
	Code    ErrorCode
	Message string
}

// ErrorCode classifies an error of the agent.
type ErrorCode uint32

// The codes of errors.
const (
	CodeInternal ErrorCode = iota
	CodeInvalid
	CodeUser // no such user
	CodeToken
	CodeSlow // the host read too slowly and lost output
)

// Encode returns the payload.
func (m *Init) Encode() []byte {
	var e encoder
	e.text(m.Token)
	e.number(uint64(m.UnixNano))
	e.pairs(m.Env)
	e.texts([]string{m.User, m.Workdir, m.SandboxID, m.TemplateID, m.Hostname, m.MachineID, string(m.Entropy), m.Address, m.Gateway, m.PresentedToken})
	e.texts(m.Nameservers)
	e.texts(m.Entrypoint)
	e.texts(m.Cmd)
	return e.b
}

// Decode sets m from a payload.
func (m *Init) Decode(b []byte) error {
	d := decoder{b: b}
	*m = Init{Token: d.text(), UnixNano: int64(d.number()), Env: d.pairs()}
	entropy := ""
	fields := []*string{&m.User, &m.Workdir, &m.SandboxID, &m.TemplateID, &m.Hostname, &m.MachineID, &entropy, &m.Address, &m.Gateway, &m.PresentedToken}
	if v := d.texts(); len(v) == len(fields) {
		for i, f := range fields {
			*f = v[i]
		}
	} else {
		d.bad = true
	}
	m.Entropy = []byte(entropy)
	m.Nameservers, m.Entrypoint, m.Cmd = d.texts(), d.texts(), d.texts()
	return d.finish()
}

// Encode returns the payload.
func (m *Start) Encode() []byte {
	var e encoder
	e.text(m.Token)
	e.texts(m.Args)
	e.pairs(m.Env)
	e.text(m.Cwd)
	e.text(m.User)
	e.flag(m.Stdin)
	e.flag(m.PTY)
	e.number(uint64(m.Cols))
	e.number(uint64(m.Rows))
	e.number(uint64(m.TimeoutMs))
	return e.b
}

// Decode sets m from a payload.
func (m *Start) Decode(b []byte) error {
	d := decoder{b: b}
	*m = Start{
		Token: d.text(), Args: d.texts(), Env: d.pairs(), Cwd: d.text(), User: d.text(),
		Stdin: d.flag(), PTY: d.flag(), Cols: uint32(d.number()), Rows: uint32(d.number()), TimeoutMs: int64(d.number()),
	}
	return d.finish()
}

// Encode returns the payload.
func (m *End) Encode() []byte {
	var e encoder
	e.number(uint64(uint32(m.Code)))
	e.flag(m.Signal)
	e.flag(m.Core)
	e.text(m.Reason)
	return e.b
}

// Decode sets m from a payload.
func (m *End) Decode(b []byte) error {
	d := decoder{b: b}
	*m = End{Code: int32(uint32(d.number())), Signal: d.flag(), Core: d.flag(), Reason: d.text()}
	return d.finish()
}

// Encode returns the payload.
func (m *Error) Encode() []byte {
	var e encoder
	e.number(uint64(m.Code))
	e.text(m.Message)
	return e.b
}

// Decode sets m from a payload.
func (m *Error) Decode(b []byte) error {
	d := decoder{b: b}
	*m = Error{Code: ErrorCode(d.number()), Message: d.text()}
	return d.finish()
}

// EncodeNumber returns the payload of a single number.
func EncodeNumber(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

// DecodeNumber returns the number of a payload.
func DecodeNumber(b []byte) (uint64, error) {
	d := decoder{b: b}
	n := d.number()
	return n, d.finish()
}

// EncodeSize returns the payload of KindResize.
func EncodeSize(cols, rows uint32) []byte {
	return binary.BigEndian.AppendUint64(nil, uint64(cols)<<32|uint64(rows))
}

// DecodeSize returns the size of a payload.
func DecodeSize(b []byte) (cols, rows uint32, err error) {
	n, err := DecodeNumber(b)
	return uint32(n >> 32), uint32(n), err
}

type encoder struct{ b []byte }

func (e *encoder) number(n uint64) { e.b = binary.BigEndian.AppendUint64(e.b, n) }

func (e *encoder) size(n int) { e.b = binary.BigEndian.AppendUint32(e.b, uint32(n)) }

func (e *encoder) flag(v bool) {
	n := byte(0)
	if v {
		n = 1
	}
	e.b = append(e.b, n)
}

func (e *encoder) text(s string) {
	e.size(len(s))
	e.b = append(e.b, s...)
}

func (e *encoder) texts(list []string) {
	e.size(len(list))
	for _, s := range list {
		e.text(s)
	}
}

func (e *encoder) pairs(m map[string]string) {
	e.size(len(m))
	for k, v := range m {
		e.text(k)
		e.text(v)
	}
}

// decoder takes values off b; after the first that is not there, bad is set and every
// value is zero.
type decoder struct {
	b   []byte
	bad bool
}

func (d *decoder) take(n int) []byte {
	if d.bad || n > len(d.b) {
		d.bad, d.b = true, nil
		return nil
	}
	v := d.b[:n]
	d.b = d.b[n:]
	return v
}

func (d *decoder) number() uint64 {
	if v := d.take(8); v != nil {
		return binary.BigEndian.Uint64(v)
	}
	return 0
}

func (d *decoder) size() int {
	if v := d.take(4); v != nil {
		return int(binary.BigEndian.Uint32(v))
	}
	return 0
}

func (d *decoder) flag() bool {
	v := d.take(1)
	return v != nil && v[0] != 0
}

func (d *decoder) text() string { return string(d.take(d.size())) }

func (d *decoder) texts() []string {
	n := d.size()
	if n > len(d.b)/4 { // each takes four bytes at least
		d.bad = true
		return nil
	}
	var list []string
	for range n {
		list = append(list, d.text())
	}
	return list
}

func (d *decoder) pairs() map[string]string {
	n := d.size()
	if n > len(d.b)/8 {
		d.bad = true
		return nil
	}
	var m map[string]string
	for range n {
		if m == nil {
			m = map[string]string{}
		}
		k := d.text()
		m[k] = d.text()
	}
	return m
}

func (d *decoder) finish() error {
	if d.bad || len(d.b) != 0 {
		return ErrMalformed
	}
	return nil
}
