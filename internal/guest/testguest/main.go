// Command testguest is the only program in the root file system of this package's
// virtual machines, which have no shell.
package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "testguest:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		args = []string{"echo", "entrypoint"}
	}
	switch args[0] {
	case "echo":
		fmt.Println(strings.Join(args[1:], " "))
	case "env":
		fmt.Println(strings.Join(os.Environ(), "\n"))
	case "cat":
		if len(args) == 1 {
			_, err := io.Copy(os.Stdout, os.Stdin)
			return err
		}
		b, err := os.ReadFile(args[1])
		fmt.Print(string(b))
		return err
	case "hostname":
		name, err := os.Hostname()
		fmt.Println(name)
		return err
	case "time":
		fmt.Println(time.Now().UnixMilli())
	case "random":
		b := make([]byte, 16)
		f, err := os.Open("/dev/urandom")
		if err != nil {
			return err
		}
		_, err = io.ReadFull(f, b)
		fmt.Printf("%x\n", b)
		return err
	case "write":
		return os.WriteFile(args[1], []byte(args[2]), 0o644)
	case "orphans":
		return orphans()
	case "zombies":
		return zombies()
	case "wait":
		time.Sleep(time.Hour)
	default:
		return fmt.Errorf("unknown command %q", args[0])
	}
	return nil
}

// orphans leaves children that end after their parent, in sessions of their own.
func orphans() error {
	for range 20 {
		c := exec.Command("/testguest", "echo")
		c.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := c.Start(); err != nil {
			return err
		}
	}
	return nil
}

// zombies prints how many processes have ended and were not reaped.
func zombies() error {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	n := 0
	for _, e := range entries {
		stat, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		if err == nil && strings.Contains(string(stat), ") Z ") {
			n++
		}
	}
	fmt.Println(n)
	return nil
}
