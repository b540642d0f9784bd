package agent

import (
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
)

// cgroups gives each process a control group of its own below dir, so that a process
// can be killed with everything it started, whatever sessions those made. With an empty
// dir there are none.
type cgroups struct {
	dir string

	mu    sync.Mutex
	next  int
	spare *cgroup // made ahead, so that a start need not wait for mkdir
	// lingering holds groups whose main process has ended and that others still live in.
	lingering []*cgroup
}

// cgroup is one control group. A nil cgroup stands for none.
type cgroup struct {
	path string
	fd   int
}

func newCgroups(dir string) *cgroups {
	c := &cgroups{dir: dir}
	c.prepare()
	return c
}

// prepare makes the spare group when there is none.
func (c *cgroups) prepare() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.spare == nil {
		c.spare = c.make()
	}
}

// take returns an empty group, nil when the machine has no control groups.
func (c *cgroups) take() *cgroup {
	c.mu.Lock()
	defer c.mu.Unlock()
	g := c.spare
	c.spare = nil
	if g == nil {
		g = c.make()
	}
	return g
}

func (c *cgroups) make() *cgroup {
	if c.dir == "" {
		return nil
	}
	path := filepath.Join(c.dir, strconv.Itoa(c.next))
	c.next++
	if err := os.Mkdir(path, 0o755); err != nil && !os.IsExist(err) {
		return nil
	}
	fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	return &cgroup{path: path, fd: fd}
}

// release removes the group now, or later when processes are still in it.
func (c *cgroups) release(g *cgroup) {
	if g == nil {
		return
	}
	syscall.Close(g.fd)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := syscall.Rmdir(g.path); err != nil {
		c.lingering = append(c.lingering, g)
	}
}

// sweep removes the groups that have become empty.
func (c *cgroups) sweep() {
	c.mu.Lock()
	defer c.mu.Unlock()
	kept := c.lingering[:0]
	for _, g := range c.lingering {
		if err := syscall.Rmdir(g.path); err != nil && !os.IsNotExist(err) {
			kept = append(kept, g)
		}
	}
	clear(c.lingering[len(kept):])
	c.lingering = kept
}

// close kills what is left and removes what is empty.
func (c *cgroups) close() {
	c.mu.Lock()
	g := c.spare
	c.spare = nil
	for _, l := range c.lingering {
		_ = l.kill()
	}
	c.mu.Unlock()
	c.release(g)
	c.sweep()
}

// kill kills every process in the group.
func (g *cgroup) kill() error {
	if g == nil {
		return syscall.ENOENT
	}
	fd, err := syscall.Open(g.path+"/cgroup.kill", syscall.O_WRONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer syscall.Close(fd)
	_, err = syscall.Write(fd, []byte("1"))
	return err
}
