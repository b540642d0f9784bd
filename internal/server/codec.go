package server

import (
	"fmt"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// strictJSON is the JSON codec of the API. Unlike Connect's own it refuses fields that
// the API does not have, so that a misspelt field is an error and not a default.
type strictJSON struct{ name string }

// Name implements connect.Codec.
func (c strictJSON) Name() string { return c.name }

// Marshal implements connect.Codec.
func (c strictJSON) Marshal(v any) ([]byte, error) {
	m, ok := v.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("%T is no protobuf message", v)
	}
	return protojson.Marshal(m)
}

// Unmarshal implements connect.Codec.
func (c strictJSON) Unmarshal(b []byte, v any) error {
	m, ok := v.(proto.Message)
	if !ok {
		return fmt.Errorf("%T is no protobuf message", v)
	}
	if len(b) == 0 {
		return fmt.Errorf("the body is empty; an empty request is {}")
	}
	return protojson.Unmarshal(b, m)
}
