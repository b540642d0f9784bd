// Package storage is Cubecow, the node's copy-on-write pool: a file system on which a
// file is cloned in constant time by sharing its blocks.
//
// The pool is an XFS in a sparse loop-mounted image, unless the pool's directory already
// lies on a file system with reflinks. Each sandbox has one directory of files in it.
package storage
