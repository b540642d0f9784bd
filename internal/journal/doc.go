// Package journal is the node's write-ahead record: typed tables in one bbolt file.
//
// A commit is durable when it returns. Commits that wait at the same time share one
// sync. Each record carries a checksum over its place and its content; a record that
// does not fit is moved to quarantine with its bytes and reported, and a database file
// that cannot be read is set aside, what is readable in it is carried over, and that is
// reported too. Neither stops the daemon.
package journal
