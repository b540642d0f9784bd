// Package server speaks the API of api/cube/v1 for the interfaces of package cube.
//
// It converts and checks the shape of what arrives, makes one call, and converts the
// answer; it decides nothing. One interceptor gives every error its code and detail. The
// same address serves gRPC, gRPC-Web, Connect and plain JSON over HTTP/1.1 and HTTP/2.
package server
