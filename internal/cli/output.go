package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"sigs.k8s.io/yaml"

	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
)

// machine reports whether the output is for a program: json or yaml.
func (a *app) machine() bool { return a.format != "table" && !a.quiet }

// document prints one message as JSON or YAML, in the API's own form.
func (a *app) document(m proto.Message) error {
	b, err := marshal(m)
	if err != nil {
		return err
	}
	return a.raw(b)
}

// documents prints a list of messages as one array.
func documents[M proto.Message](a *app, list []M) error {
	all := make([]json.RawMessage, len(list))
	for i, m := range list {
		b, err := marshal(m)
		if err != nil {
			return err
		}
		all[i] = b
	}
	b, err := json.Marshal(all)
	if err != nil {
		return err
	}
	return a.raw(b)
}

func marshal(m proto.Message) ([]byte, error) {
	return protojson.MarshalOptions{EmitDefaultValues: true}.Marshal(m)
}

func (a *app) raw(b []byte) error {
	if a.format == "yaml" {
		out, err := yaml.JSONToYAML(b)
		if err != nil {
			return err
		}
		_, err = a.stdout.Write(append([]byte("---\n"), out...))
		return err
	}
	var compact, out bytes.Buffer
	if err := json.Compact(&compact, b); err != nil {
		return err
	}
	if err := json.Indent(&out, compact.Bytes(), "", "  "); err != nil {
		return err
	}
	out.WriteByte('\n')
	_, err := a.stdout.Write(out.Bytes())
	return err
}

// ids prints one ID a line.
func (a *app) ids(list ...string) error {
	for _, id := range list {
		if _, err := fmt.Fprintln(a.stdout, line(id)); err != nil {
			return err
		}
	}
	return nil
}

// table prints rows under a header.
func table(w io.Writer, header string, rows [][]string) error {
	tw := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	fmt.Fprintln(tw, strings.ReplaceAll(header, " ", "\t"))
	for _, row := range rows {
		cells := make([]string, len(row))
		for i, c := range row {
			cells[i] = orDash(line(c))
		}
		fmt.Fprintln(tw, strings.Join(cells, "\t"))
	}
	return tw.Flush()
}

// fields prints pairs of name and value, one a line, leaving out those without value.
func fields(w io.Writer, pairs ...[2]string) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, p := range pairs {
		if p[1] != "" {
			fmt.Fprintf(tw, "%s:\t%s\n", p[0], line(p[1]))
		}
	}
	return tw.Flush()
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// phaseName is the phase as people read it, for example running.
func phaseName(p cubev1.Phase) string {
	return strings.ToLower(strings.TrimPrefix(p.String(), "PHASE_"))
}

func sizeName(r *cubev1.Resources) string {
	return fmt.Sprintf("%d CPU, %s", r.GetVcpus(), bytesName(int64(r.GetMemoryMib())<<20))
}

// bytesName is a size with its unit, for example 1.5 GiB.
func bytesName(n int64) string {
	const unit = 1024
	if n < unit {
		return fmt.Sprintf("%d B", n)
	}
	v, i := float64(n)/unit, 0
	for ; v >= unit && i < 4; i++ {
		v /= unit
	}
	return strings.Replace(fmt.Sprintf("%.1f %ciB", v, "KMGTP"[i]), ".0 ", " ", 1)
}

// timeName is a point in time and how far away it is.
func timeName(t *timestamppb.Timestamp) string {
	if t == nil {
		return ""
	}
	return fmt.Sprintf("%s (%s)", t.AsTime().UTC().Format(time.RFC3339), ago(t))
}

// ago tells how far away a point in time is, in its largest unit.
func ago(t *timestamppb.Timestamp) string {
	if t == nil {
		return ""
	}
	d := time.Since(t.AsTime())
	if d < 0 {
		return "in " + spanName(-d)
	}
	return spanName(d) + " ago"
}

func spanName(d time.Duration) string {
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// millis is a short duration in milliseconds.
func millis(d *durationpb.Duration) string {
	return fmt.Sprintf("%.1f ms", float64(d.AsDuration().Microseconds())/1000)
}

// pairsName lists a map as k=v, sorted by the caller's needs.
func pairsName(m map[string]string) string {
	list := make([]string, 0, len(m))
	for _, k := range sortedKeys(m) {
		list = append(list, k+"="+m[k])
	}
	return strings.Join(list, ", ")
}
