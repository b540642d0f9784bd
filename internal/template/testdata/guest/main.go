// Command guest is all that the image of the tests has: its server, and its shell, which
// knows two commands.
package main

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net"
	"os"
)

func main() {
	if len(os.Args) != 3 || os.Args[1] != "-c" {
		fmt.Println("env", os.Getenv("FROM"))
		return
	}
	switch os.Args[2] {
	case "serve":
		serve()
	case "fail":
		fmt.Fprintln(os.Stderr, "told to fail")
		os.Exit(3)
	}
}

// serve tells everyone who connects the same random number, which is on the disk, too.
func serve() {
	var b [8]byte
	rand.Read(b[:])
	number := hex.EncodeToString(b[:])
	if err := os.WriteFile("/number", []byte(number), 0o644); err != nil {
		panic(err)
	}
	l, err := net.Listen("tcp", ":8080")
	if err != nil {
		panic(err)
	}
	for {
		conn, err := l.Accept()
		if err != nil {
			panic(err)
		}
		disk, err := os.ReadFile("/number")
		fmt.Fprintf(conn, "%s %s %v\n", number, disk, err)
		conn.Close()
	}
}
