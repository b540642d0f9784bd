package cube

import "context"

// PoolObject is one thing that takes space on the pool.
type PoolObject struct {
	Kind  string `json:"kind"` // template, snapshot, sandbox or volume
	ID    string `json:"id"`
	Name  string `json:"name,omitempty"`
	Usage Usage  `json:"usage"`
}

// PoolStatus is what was measured of the pool. Sizes are in bytes.
type PoolStatus struct {
	Dir     string `json:"dir"`
	Reflink bool   `json:"reflink"` // false: every clone is a full copy
	Total   int64  `json:"total"`
	Used    int64  `json:"used"`
	// Reserve is the watermark: with less than this free, creates are refused.
	Reserve int64        `json:"reserve"`
	Objects []PoolObject `json:"objects,omitempty"`
}

// Garbage is one thing on the pool that nobody owns.
type Garbage struct {
	Path   string `json:"path"`
	Bytes  int64  `json:"bytes"` // that its removal frees
	Reason string `json:"reason"`
}

// Pool is the inbound interface of the pool.
type Pool interface {
	// PoolStatus measures the pool and, when asked to, every object on it, which reads
	// the extent maps of all files.
	PoolStatus(ctx context.Context, objects bool) (PoolStatus, error)
	// CollectGarbage lists what nobody owns and, unless dryRun, removes it.
	CollectGarbage(ctx context.Context, dryRun bool) ([]Garbage, error)
}
