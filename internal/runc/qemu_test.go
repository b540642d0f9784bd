package runc

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cubesandbox/cubelet/internal/testenv"
)

// TestQEMUBootsAKernelInASlot holds the seccomp list and the mounts against the program
// that they are made for. The arguments are those that reach most system calls.
func TestQEMUBootsAKernelInASlot(t *testing.T) {
	const qemu = "/usr/bin/qemu-system-x86_64"
	if _, err := os.Stat(qemu); err != nil {
		t.Fatalf("QEMU is missing: %v", err)
	}
	n := newNode(t, 0)
	in, err := n.Claim(t.Context(), "sb-1", limits())
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	open := func(path string, flags int) *os.File {
		f, err := os.OpenFile(path, flags, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	console, logs := filepath.Join(dir, "console"), filepath.Join(dir, "log")
	disk := open(filepath.Join(dir, "disk"), os.O_RDWR|os.O_CREATE)
	memory := open(filepath.Join(dir, "memory"), os.O_RDWR|os.O_CREATE)
	if err := errors.Join(disk.Truncate(1<<20), memory.Truncate(128<<20), memory.Chown(in.UID, in.UID)); err != nil {
		t.Fatal(err)
	}
	files := []*os.File{
		open(os.DevNull, os.O_RDWR), open(logs, os.O_WRONLY|os.O_CREATE|os.O_APPEND), open(logs, os.O_WRONLY|os.O_APPEND),
		open(filepath.Join(testenv.KernelDir(t), "vmlinuz"), os.O_RDONLY), disk,
		open(console, os.O_WRONLY|os.O_CREATE|os.O_APPEND), memory,
	}
	args := strings.Fields(qemu + ` -M microvm,acpi=on,memory-backend=m0 -accel tcg,thread=multi,tb-size=8 -cpu max -smp 2 -m 128
		-object memory-backend-file,id=m0,size=128M,mem-path=/proc/self/fd/6,share=on
		-nodefaults -no-user-config -display none -kernel /proc/self/fd/3
		-add-fd fd=4,set=4 -blockdev driver=file,filename=/dev/fdset/4,node-name=d0,locking=off -device virtio-blk-device,drive=d0
		-add-fd fd=5,set=5 -chardev file,id=c0,path=/dev/fdset/5,append=on -serial chardev:c0
		-device virtio-rng-device
		-sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny`)
	args = append(args, "-append", "console=ttyS0 panic=-1")
	if err := n.Launch(t.Context(), "sb-1", args, nil, files); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 2*time.Minute, func() error {
		text, err := os.ReadFile(console)
		if err != nil || !bytes.Contains(text, []byte("Linux version")) {
			said, _ := os.ReadFile(logs)
			return fmt.Errorf("console says %.300q, QEMU says %.300q: %w", text, said, err)
		}
		return nil
	})
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", in.Process.PID))
	if err != nil || !bytes.Contains(status, []byte("Seccomp_filters:\t2")) && !bytes.Contains(status, []byte("Seccomp_filters:\t3")) {
		t.Errorf("QEMU's own filter is not in force: %v\n%s", err, status)
	}
	if text, err := os.ReadFile(logs); err != nil || len(text) > 0 {
		t.Errorf("QEMU says %q, %v", text, err)
	}
}
