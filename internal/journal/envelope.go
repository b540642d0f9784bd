package journal

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
)

// An envelope is what a table stores under a key:
//
//	byte 0     format, envelopeV1
//	bytes 1-4  CRC-32C, little endian, of the bucket, a zero byte, the key, a zero
//	           byte, the format byte and the payload
//	bytes 5-   payload, JSON
//
// The place is part of the sum, so a record that turns up under another key is corrupt.
const (
	envelopeV1   = 1
	envelopeHead = 5
)

func seal(bucket, key string, payload []byte) []byte {
	b := make([]byte, envelopeHead, envelopeHead+len(payload))
	b[0] = envelopeV1
	binary.LittleEndian.PutUint32(b[1:], checksum(bucket, key, envelopeV1, payload))
	return append(b, payload...)
}

// unseal returns the payload of an envelope, which shares memory with it.
func unseal(bucket, key string, b []byte) ([]byte, error) {
	if len(b) < envelopeHead {
		return nil, fmt.Errorf("%d bytes are too short for a record", len(b))
	}
	if b[0] != envelopeV1 {
		return nil, fmt.Errorf("unknown record format %d", b[0])
	}
	payload := b[envelopeHead:]
	want := binary.LittleEndian.Uint32(b[1:])
	if got := checksum(bucket, key, b[0], payload); got != want {
		return nil, fmt.Errorf("checksum %08x, want %08x", got, want)
	}
	return payload, nil
}

func checksum(bucket, key string, format byte, payload []byte) uint32 {
	table := crc32.MakeTable(crc32.Castagnoli)
	sum := crc32.Update(0, table, []byte(bucket+"\x00"+key+"\x00"))
	sum = crc32.Update(sum, table, []byte{format})
	return crc32.Update(sum, table, payload)
}
