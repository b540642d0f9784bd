// Command guestprog is all that a tiny image holds: a few things that tests want done
// inside a guest without a userland.
package main

import (
	"fmt"
	"net/http"
	"os"
	"strings"
	"time"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "guestprog:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("usage: guestprog echo|env|cwd|serve")
	}
	switch args[0] {
	case "echo":
		fmt.Println(strings.Join(args[1:], " "))
	case "env":
		fmt.Println(os.Getenv(args[1]))
	case "cwd":
		dir, err := os.Getwd()
		if err != nil {
			return err
		}
		fmt.Println(dir)
	case "serve":
		begin := time.Now().Format(time.RFC3339Nano)
		return http.ListenAndServe(":8080", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprintln(w, "up since", begin)
		}))
	default:
		return fmt.Errorf("no command %q", args[0])
	}
	return nil
}
