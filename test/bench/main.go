// Command bench measures a running node and prints a table and JSON. Every failure
// counts; ratios are of one run, since machines are noisy.
//
//	go run ./test/bench -address unix:///var/lib/cubelet/run/cubelet.sock -template base
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"connectrpc.com/connect"

	cubev1 "github.com/cubesandbox/cubelet/api/cube/v1"
	"github.com/cubesandbox/cubelet/api/cube/v1/cubev1connect"
)

type options struct {
	address, template, rootfs, runc, out string
	n, storm, parallel                   int
}

func main() {
	var o options
	flag.StringVar(&o.address, "address", "unix:///var/lib/cubelet/run/cubelet.sock", "unix socket of the node")
	flag.StringVar(&o.template, "template", "base", "template to create sandboxes of")
	flag.StringVar(&o.rootfs, "rootfs", "", "tar of the same root file system, to compare with `runc run`; empty: no comparison")
	flag.StringVar(&o.runc, "runc", "runc", "runc binary")
	flag.StringVar(&o.out, "json", "", "also write the results to this file")
	flag.IntVar(&o.n, "n", 50, "sequential creates")
	flag.IntVar(&o.storm, "storm", 100, "creates of the storm")
	flag.IntVar(&o.parallel, "c", 20, "creates of the storm at a time")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		stop()
		os.Exit(1)
	}
}

// report is what the command prints.
type report struct {
	Command string   `json:"command"`
	Time    string   `json:"time"`
	Machine string   `json:"machine"`
	Node    string   `json:"node"`
	Series  []series `json:"series"`
}

type bench struct {
	options
	sandboxes cubev1connect.SandboxServiceClient
	nodes     cubev1connect.NodeServiceClient
	samples   *samples
}

func run(ctx context.Context, o options) error {
	hc := unixClient(strings.TrimPrefix(o.address, "unix://"))
	b := &bench{
		options:   o,
		sandboxes: cubev1connect.NewSandboxServiceClient(hc, "http://cubelet"),
		nodes:     cubev1connect.NewNodeServiceClient(hc, "http://cubelet"),
		samples:   newSamples(),
	}
	res, err := b.nodes.GetNodeStatus(ctx, connect.NewRequest(&cubev1.GetNodeStatusRequest{}))
	if err != nil {
		return fmt.Errorf("node status: %w", err)
	}
	s := res.Msg.Status
	rep := report{
		Command: "go run ./test/bench " + strings.Join(os.Args[1:], " "), Time: time.Now().UTC().Format(time.RFC3339),
		Machine: fmt.Sprintf("%d × %s, %d MiB", s.Cpus, s.CpuModel, s.MemoryBytes>>20),
		Node:    fmt.Sprintf("QEMU %s %s, guest kernel %s, %d launchers and %d networks waiting", s.Machine.Qemu, s.Machine.Accelerator, s.Machine.Kernel, s.VmmSlots, s.NetworkSlots),
	}
	b.sequential(ctx)
	b.stormOf(ctx)
	rep.Series = b.series()
	if o.rootfs != "" {
		cmp, err := compareRunc(ctx, o.runc, o.rootfs, o.n)
		if err != nil {
			return fmt.Errorf("compare with runc: %w", err)
		}
		rep.Series = append(rep.Series, cmp)
	}
	return rep.print(o.out)
}

func unixClient(path string) *http.Client {
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Client{Transport: &http.Transport{
		Protocols: protocols,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		},
	}}
}

func (b *bench) series() []series {
	return []series{
		b.samples.series("create: VMM restored and running", "p50 <= 60 ms"),
		b.samples.series("create: agent answered (whole call)", ""),
		b.samples.series("create to first exec output", "p50 <= 600 ms"),
		b.samples.series("exec in a running sandbox", ""),
		b.samples.series("delete", ""),
		b.samples.series(stormName(b.options), "no failure"),
	}
}

func stormName(o options) string {
	return fmt.Sprintf("storm: %d creates, %d at a time", o.storm, o.parallel)
}

// sequential creates, execs and deletes one sandbox after the other. It waits for a
// full pool of launchers before each, since the cold tier is a waiting launcher.
func (b *bench) sequential(ctx context.Context) {
	for range b.n {
		if err := b.poolFull(ctx); err != nil {
			b.samples.fail("create: VMM restored and running", err)
			return
		}
		b.one(ctx)
	}
}

// poolFull waits until the number of waiting launchers stops growing.
func (b *bench) poolFull(ctx context.Context) error {
	last := int64(-1)
	for {
		res, err := b.nodes.GetNodeStatus(ctx, connect.NewRequest(&cubev1.GetNodeStatusRequest{}))
		if err != nil {
			return err
		}
		now := int64(res.Msg.Status.VmmSlots)<<32 | int64(res.Msg.Status.NetworkSlots)
		if now == last && res.Msg.Status.VmmSlots > 0 {
			return nil
		}
		last = now
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(300 * time.Millisecond):
		}
	}
}

func (b *bench) one(ctx context.Context) {
	begin := time.Now()
	res, err := b.sandboxes.CreateSandbox(ctx, connect.NewRequest(&cubev1.CreateSandboxRequest{TemplateId: b.template}))
	if err != nil {
		b.samples.fail("create: VMM restored and running", err)
		b.samples.fail("create: agent answered (whole call)", err)
		return
	}
	b.samples.add("create: agent answered (whole call)", time.Since(begin))
	for _, t := range res.Msg.Timings {
		if t.Stage == "restore" {
			b.samples.add("create: VMM restored and running", t.Start.AsDuration()+t.Duration.AsDuration())
		}
	}
	id := res.Msg.Sandbox.Id
	if err := b.exec(ctx, id); err != nil {
		b.samples.fail("create to first exec output", err)
	} else {
		b.samples.add("create to first exec output", time.Since(begin))
	}
	for range 3 {
		begin := time.Now()
		if err := b.exec(ctx, id); err != nil {
			b.samples.fail("exec in a running sandbox", err)
			continue
		}
		b.samples.add("exec in a running sandbox", time.Since(begin))
	}
	b.remove(ctx, id)
}

// exec runs echo and returns when its output has arrived.
func (b *bench) exec(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	stream := b.sandboxes.ExecSandbox(ctx)
	defer func() { _ = stream.CloseResponse() }() // the exec was judged by then
	err := stream.Send(&cubev1.ExecSandboxRequest{Request: &cubev1.ExecSandboxRequest_Start{
		Start: &cubev1.ExecStart{SandboxId: id, Args: []string{"/bin/echo", "hello"}},
	}})
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if err := stream.CloseRequest(); err != nil {
		return err
	}
	for {
		msg, err := stream.Receive()
		if err != nil {
			return err
		}
		if string(msg.GetStdout()) == "hello\n" {
			return nil
		}
		if x := msg.GetExited(); x != nil {
			return fmt.Errorf("exited with %d before its output", x.ExitCode)
		}
	}
}

func (b *bench) remove(ctx context.Context, id string) {
	begin := time.Now()
	if _, err := b.sandboxes.DeleteSandbox(ctx, connect.NewRequest(&cubev1.DeleteSandboxRequest{SandboxId: id})); err != nil {
		b.samples.fail("delete", err)
		return
	}
	b.samples.add("delete", time.Since(begin))
}

// stormOf creates many sandboxes at once, then deletes them.
func (b *bench) stormOf(ctx context.Context) {
	var wg sync.WaitGroup
	work := make(chan struct{})
	ids := make(chan string, b.storm)
	for range b.parallel {
		wg.Go(func() {
			for range work {
				begin := time.Now()
				res, err := b.sandboxes.CreateSandbox(ctx, connect.NewRequest(&cubev1.CreateSandboxRequest{TemplateId: b.template}))
				if err != nil {
					b.samples.fail(stormName(b.options), err)
					continue
				}
				b.samples.add(stormName(b.options), time.Since(begin))
				ids <- res.Msg.Sandbox.Id
			}
		})
	}
	for range b.storm {
		work <- struct{}{}
	}
	close(work)
	wg.Wait()
	close(ids)
	for id := range ids {
		b.remove(ctx, id)
	}
}

func (r report) print(out string) error {
	fmt.Printf("machine  %s\nnode     %s\ncommand  %s\n\n", r.Machine, r.Node, r.Command)
	tw := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "OPERATION\tN\tFAILED\tP50\tP99\tMAX\tGOAL")
	for _, s := range r.Series {
		fmt.Fprintf(tw, "%s\t%d\t%d\t%s\t%s\t%s\t%s\n", s.Name, s.N, s.Failures, ms(s.P50), ms(s.P99), ms(s.Max), s.Goal)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for _, s := range r.Series {
		if s.FirstErr != "" {
			fmt.Printf("\nfirst failure of %q: %s\n", s.Name, s.FirstErr)
		}
	}
	if out == "" {
		return nil
	}
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(out, append(b, '\n'), 0o644)
}
