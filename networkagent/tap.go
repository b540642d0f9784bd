package networkagent

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// vnetHeaderBytes is the size of struct virtio_net_hdr, the kernel's default.
const vnetHeaderBytes = 10

// openTap opens the tap device of the calling thread's network namespace, making it when
// there is none. It is persistent, so that it outlives a VMM that dies and is opened
// again for the next; offloads start switched off, whatever the last VMM had set.
func openTap(name string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/net/tun: %w", err)
	}
	if err := attachTap(fd, name); err != nil {
		_ = unix.Close(fd) // nothing was written to it
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

func attachTap(fd int, name string) error {
	req, err := unix.NewIfreq(name)
	if err != nil {
		return fmt.Errorf("tap %s: %w", name, err)
	}
	req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, req); err != nil {
		return fmt.Errorf("attach to tap %s: %w", name, err)
	}
	if err := unix.IoctlSetInt(fd, unix.TUNSETPERSIST, 1); err != nil {
		return fmt.Errorf("keep tap %s: %w", name, err)
	}
	if err := unix.IoctlSetPointerInt(fd, unix.TUNSETVNETHDRSZ, vnetHeaderBytes); err != nil {
		return fmt.Errorf("set the header size of tap %s: %w", name, err)
	}
	if err := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, 0); err != nil {
		return fmt.Errorf("switch off offloads of tap %s: %w", name, err)
	}
	return nil
}
