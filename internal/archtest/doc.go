// Package archtest holds the tests of the code's shape: who may import whom, how long a
// file or function may be, that there is no init() and no package variable that changes,
// that exported names are documented.
package archtest
