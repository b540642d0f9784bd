package main

import (
	"github.com/spf13/cobra"

	"github.com/cubesandbox/cubelet/internal/daemon"
)

func newServeCommand() *cobra.Command {
	var f nodeFlags
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the node",
		Long: "Run the node until SIGTERM. Running sandboxes go on when the daemon stops; a daemon\n" +
			"that is started again on the same root takes them up.",
		Example: "  cubelet serve\n" +
			"  cubelet serve --root /srv/cubelet --pool-size 100GiB\n" +
			"  cubelet serve --listen 10.0.0.5:7443 --tls-cert node.pem --tls-key node.key --tls-client-ca ca.pem",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := f.config()
			if err != nil {
				return err
			}
			if needNewMnt(&cfg) {
				newCubeMnt(&cfg)
			}
			return daemon.Run(cmd.Context(), cfg)
		},
	}
	f.bind(cmd)
	fl := cmd.Flags()
	fl.StringVar(&f.cfg.Name, "name", "", "name of the node (default: the host's)")
	fl.StringVar(&f.cfg.Address, "address", "", "path of the unix socket (default ROOT/run/cubelet.sock)")
	fl.StringVar(&f.cfg.ContainerdAddress, "containerd-address", "", "socket of an external containerd (default: run one inside)")
	fl.StringVar(&f.cfg.TLS.Listen, "listen", "", "also listen on this TCP address, with mutual TLS")
	fl.StringVar(&f.cfg.TLS.Cert, "tls-cert", "", "certificate of the node")
	fl.StringVar(&f.cfg.TLS.Key, "tls-key", "", "private key of the node")
	fl.StringVar(&f.cfg.TLS.ClientCA, "tls-client-ca", "", "CA that signs the certificates of clients")
	fl.IntVar(&f.cfg.VMMSlots, "vmm-slots", 4, "launchers kept waiting in their jails")
	fl.IntVar(&f.cfg.NetworkSlots, "network-slots", 8, "network namespaces kept waiting")
	fl.IntVar(&f.cfg.MaxSandboxes, "max-sandboxes", 1000, "how many sandboxes the node holds at most")
	return cmd
}
