package networkagent

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// onThread runs fn on an operating system thread of its own, which fn may move to
// another network namespace, and puts the thread back into the host's, home, before any
// other goroutine can run on it. A thread that cannot go back is never unlocked, so the
// runtime ends it with its goroutine.
func onThread(home *os.File, fn func() error) error {
	done := make(chan error, 1)
	go func() { done <- locked(home, fn) }()
	return <-done
}

func locked(home *os.File, fn func() error) error {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		// The main thread must not move: /proc/self means it, and the runtime parks it
		// instead of ending it, which would pin the namespace for ever.
		defer runtime.UnlockOSThread()
		return onThread(home, fn)
	}
	err := fn()
	if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back != nil {
		return errors.Join(err, fmt.Errorf("return to the host's network namespace: %w", back))
	}
	runtime.UnlockOSThread()
	return err
}

// inside runs fn in the network namespace that is pinned at path. CodeNotFound when
// there is none.
func inside(home *os.File, path string, fn func() error) error {
	ns, err := openNamespace(path)
	if err != nil {
		return err
	}
	defer ns.Close()
	return onThread(home, func() error {
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter network namespace %s: %w", path, err)
		}
		return fn()
	})
}
