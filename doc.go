// Package cube is the vocabulary of Cubelet: the domain types, the phase table,
// the error codes and the inbound interfaces that the RPC server speaks to.
//
// It imports the standard library only and does no I/O, so every other package
// may import it. The words are those of docs/ARCHITECTURE.md; no synonym of them
// is used anywhere in the project.
package cube
