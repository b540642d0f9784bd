package wire

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
)

func TestPayloadsSurviveTheTrip(t *testing.T) {
	in := Init{
		Token: "t", UnixNano: -5, Env: map[string]string{"A": "b", "": "c"}, User: "u", Workdir: "/w", SandboxID: "s",
		TemplateID: "t", Hostname: "h", MachineID: "m", Entropy: []byte{0, 255}, Address: "a", Gateway: "g",
		Nameservers: []string{"n", ""}, Entrypoint: []string{"e"}, Cmd: []string{"c"}, PresentedToken: "p",
	}
	var gotInit Init
	check(t, gotInit.Decode(in.Encode()), in, &gotInit)
	start := Start{Token: "t", Args: []string{"a", ""}, Env: map[string]string{"k": "v"}, Cwd: "/", User: "1:2", Stdin: true, PTY: true, Cols: 1 << 31, Rows: 2, TimeoutMs: 1}
	var gotStart Start
	check(t, gotStart.Decode(start.Encode()), start, &gotStart)
	end := End{Code: -1, Signal: true, Core: true, Reason: "r"}
	var gotEnd End
	check(t, gotEnd.Decode(end.Encode()), end, &gotEnd)
	fault := Error{Code: CodeUser, Message: "m"}
	var gotError Error
	check(t, gotError.Decode(fault.Encode()), fault, &gotError)
	if c, r, err := DecodeSize(EncodeSize(1<<32-1, 3)); c != 1<<32-1 || r != 3 || err != nil {
		t.Errorf("size became %d %d %v", c, r, err)
	}
}

func check[T any](t *testing.T, err error, want T, got *T) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, *got); d != "" {
		t.Error(d)
	}
}

func TestReaderTakesFramesInAnyPieces(t *testing.T) {
	var stream []byte
	var want [][]byte
	for n := range 40 {
		payload := bytes.Repeat([]byte{byte(n)}, n*n*31)
		want = append(want, payload)
		stream = AppendFrame(stream, Kind(n+1), payload)
	}
	for name, src := range map[string]io.Reader{
		"whole": bytes.NewReader(stream), "bytes": iotest.OneByteReader(bytes.NewReader(stream)), "halves": iotest.HalfReader(bytes.NewReader(stream)),
	} {
		r := Reader{R: src, Max: MaxReply}
		for n, w := range want {
			k, got, err := r.Next()
			if err != nil || k != Kind(n+1) || !bytes.Equal(got, w) {
				t.Fatalf("%s: frame %d: kind %d, %d bytes, %v", name, n, k, len(got), err)
			}
		}
		if _, _, err := r.Next(); !errors.Is(err, io.EOF) {
			t.Errorf("%s: at the end: %v", name, err)
		}
	}
}

func TestReaderRefusesLargeAndTruncatedFrames(t *testing.T) {
	r := Reader{R: bytes.NewReader(AppendFrame(nil, KindOK, make([]byte, 11))), Max: 10}
	if _, _, err := r.Next(); !errors.Is(err, ErrTooLarge) {
		t.Errorf("large: %v", err)
	}
	whole := AppendFrame(nil, KindOK, []byte("abc"))
	for n := 1; n < len(whole); n++ {
		r := Reader{R: bytes.NewReader(whole[:n]), Max: 10}
		if _, _, err := r.Next(); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
}

func FuzzReplies(f *testing.F) {
	end := End{Code: 3, Reason: "r"}
	fault := Error{Code: CodeSlow, Message: "m"}
	f.Add(AppendFrame(AppendFrame(nil, KindEnd, end.Encode()), KindError, fault.Encode()))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := Reader{R: bytes.NewReader(b), Max: MaxReply}
		for {
			_, payload, err := r.Next()
			if err != nil {
				return
			}
			decodeAll(t, payload)
		}
	})
}

func FuzzRequests(f *testing.F) {
	start := Start{Args: []string{"a"}, Env: map[string]string{"k": "v"}}
	in := Init{Env: map[string]string{"k": "v"}, Cmd: []string{"c"}}
	f.Add(start.Encode())
	f.Add(in.Encode())
	f.Fuzz(decodeAll)
}

// decodeAll decodes a payload as everything; what decodes must survive the trip.
func decodeAll(t *testing.T, b []byte) {
	var in, in2 Init
	if in.Decode(b) == nil {
		check(t, in2.Decode(in.Encode()), in, &in2)
	}
	var st, st2 Start
	if st.Decode(b) == nil {
		check(t, st2.Decode(st.Encode()), st, &st2)
	}
	var end, end2 End
	if end.Decode(b) == nil {
		check(t, end2.Decode(end.Encode()), end, &end2)
	}
	var fault, fault2 Error
	if fault.Decode(b) == nil {
		check(t, fault2.Decode(fault.Encode()), fault, &fault2)
	}
	_, _ = DecodeNumber(b)
}
