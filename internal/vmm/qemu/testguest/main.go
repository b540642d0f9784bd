// Command testguest is the PID 1 of this package's tests: a guest that counts ticks,
// prints them on the console and answers on TCP, so that a test sees whether memory,
// disks and network survive a restore.
//
// The protocol on port 7 is one line per request and per answer:
//
//	tick          the number of ticks so far
//	set WORD      keep a word in memory
//	get           the word
//	write WORD    write a word to the start of /dev/vdb, through to the disk
//	read          read it back
//	first         the word at the start of /dev/vda
//	sink N        read N bytes, answer with their count
//	source N      answer with N bytes
//	touch MIB     dirty that much memory
//	poweroff      end the machine
package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// tickEvery is the pause between two ticks.
const tickEvery = 100 * time.Millisecond

func main() {
	if err := run(); err != nil {
		fmt.Println("testguest:", err)
	}
	// PID 1 must not end by itself: the kernel would panic.
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	select {}
}

func run() error {
	for _, m := range []struct{ kind, dir string }{{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"}} {
		if err := unix.Mount(m.kind, m.dir, m.kind, 0, ""); err != nil {
			return fmt.Errorf("mount %s: %w", m.dir, err)
		}
	}
	if err := loadModules(); err != nil {
		return err
	}
	if err := network(); err != nil {
		return err
	}
	listener, err := net.Listen("tcp", ":7")
	if err != nil {
		return err
	}
	fmt.Println("testguest: ready, up", uptime())
	g := &guest{}
	go g.serve(listener)
	g.count()
	return nil
}

func uptime() string {
	b, _ := os.ReadFile("/proc/uptime")
	up, _, _ := strings.Cut(string(b), " ")
	return up
}

func loadModules() error {
	names, err := filepath.Glob("/modules/*.ko")
	if err != nil {
		return err
	}
	sort.Strings(names)
	for _, name := range names {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		_ = f.Close()
		// The host's processor may lack what an accelerated variant needs.
		if err != nil && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("load %s: %w", name, err)
		}
	}
	return nil
}

func network() error {
	args, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return err
	}
	for word := range strings.FieldsSeq(string(args)) {
		value, ok := strings.CutPrefix(word, "cube.address=")
		if !ok {
			continue
		}
		address, err := netlink.ParseAddr(value)
		if err != nil {
			return err
		}
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(link, address); err != nil {
			return err
		}
		return netlink.LinkSetUp(link)
	}
	return fmt.Errorf("no cube.address in %q", args)
}

type guest struct {
	ticks atomic.Int64
	word  atomic.Value
	hoard atomic.Value
}

func (g *guest) count() {
	for range time.Tick(tickEvery) {
		fmt.Println("tick", g.ticks.Add(1))
	}
}

func (g *guest) serve(l net.Listener) {
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer conn.Close()
			in := bufio.NewReader(conn)
			for {
				line, err := in.ReadString('\n')
				if err != nil {
					return
				}
				verb, arg, _ := strings.Cut(strings.TrimSpace(line), " ")
				if err := g.answer(verb, arg, in, conn); err != nil {
					fmt.Fprintln(conn, "error:", err)
				}
			}
		}()
	}
}

func (g *guest) answer(verb, arg string, in io.Reader, out io.Writer) error {
	n, _ := strconv.ParseInt(arg, 10, 64)
	switch verb {
	case "tick":
		fmt.Fprintln(out, g.ticks.Load())
	case "set":
		g.word.Store(arg)
		fmt.Fprintln(out, "ok")
	case "get":
		fmt.Fprintln(out, g.word.Load())
	case "write":
		if err := writeDisk(arg); err != nil {
			return err
		}
		fmt.Fprintln(out, "ok")
	case "read":
		return answerWord(out, "/dev/vdb")
	case "first":
		return answerWord(out, "/dev/vda")
	case "sink":
		got, err := io.CopyN(io.Discard, in, n)
		if err != nil {
			return err
		}
		fmt.Fprintln(out, got)
	case "source":
		_, err := io.CopyN(out, zeros{}, n)
		return err
	case "touch":
		b := make([]byte, n<<20)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		g.hoard.Store(b)
		fmt.Fprintln(out, "ok")
	case "poweroff":
		return unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	default:
		return fmt.Errorf("unknown request %q", verb)
	}
	return nil
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

func writeDisk(word string) error {
	f, err := os.OpenFile("/dev/vdb", os.O_WRONLY|os.O_SYNC, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	block := make([]byte, 4096)
	copy(block, word)
	_, err = f.WriteAt(block, 0)
	return err
}

func answerWord(out io.Writer, disk string) error {
	word, err := readDisk(disk)
	if err == nil {
		_, err = fmt.Fprintln(out, word)
	}
	return err
}

func readDisk(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	if err := unix.IoctlSetInt(int(f.Fd()), unix.BLKFLSBUF, 0); err != nil {
		return "", err
	}
	block := make([]byte, 4096)
	if _, err := io.ReadFull(f, block); err != nil {
		return "", err
	}
	word, _, _ := strings.Cut(string(block), "\x00")
	return word, nil
}
