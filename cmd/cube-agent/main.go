// Command cube-agent is the guest agent. The kernel starts it as PID 1 of every guest;
// with --no-init it serves its API on the machine it is started on, for tests.
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strconv"
	"syscall"

	cube "github.com/cubesandbox/cubelet"
	"github.com/cubesandbox/cubelet/internal/agent"
	"github.com/cubesandbox/cubelet/internal/agent/boot"
)

func main() {
	listen := flag.String("listen", ":"+strconv.Itoa(cube.AgentPort), "address of the API")
	noInit := flag.Bool("no-init", false, "serve the API only, and leave the machine alone")
	cgroups := flag.String("cgroups", "", "with --no-init: directory of a cgroup v2 hierarchy for the programs")
	flag.Parse()

	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	cfg := agent.Config{Log: log, PID1: os.Getpid() == 1, Cgroups: *cgroups}
	if !*noInit {
		if err := setUpMachine(&cfg); err != nil {
			boot.Fail(err)
			os.Exit(1)
		}
	}
	if err := serve(cfg, *listen); err != nil {
		fmt.Fprintln(os.Stderr, "cube-agent:", err)
		if cfg.Machine != nil {
			boot.Fail(err)
		}
		os.Exit(1)
	}
}

// setUpMachine does the duties of PID 1 before anything is served.
func setUpMachine(cfg *agent.Config) error {
	if os.Getpid() != 1 {
		return fmt.Errorf("not started by the kernel as PID 1; use --no-init on a running system")
	}
	runtime.GOMAXPROCS(min(runtime.NumCPU(), 2))
	m, err := boot.Run(cfg.Log)
	if err != nil {
		return err
	}
	cfg.Machine, cfg.Cgroups = m, boot.CgroupDir
	return nil
}

func serve(cfg agent.Config, listen string) error {
	srv, err := agent.New(cfg)
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp4", listen)
	if err != nil {
		return err
	}
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT, syscall.SIGUSR1, syscall.SIGUSR2)
	defer cancel()
	tuneMemory()
	cfg.Log.Info("agent serves", "address", l.Addr().String())
	if err := srv.Serve(ctx, l); err != nil {
		return err
	}
	if cfg.Machine != nil {
		return cfg.Machine.PowerOff()
	}
	return srv.Close()
}

// tuneMemory starts with a clean heap and lets it grow to some megabytes before the next
// collection: one in the first call after a restore would be paid for with a translation
// of the whole collector.
func tuneMemory() {
	debug.SetGCPercent(300)
	debug.SetMemoryLimit(64 << 20)
	debug.FreeOSMemory()
}
