package cube

import (
	"context"
	"time"
)

// Version names a build.
type Version struct {
	Cubelet string `json:"cubelet"` // version of this build
	Commit  string `json:"commit,omitempty"`
	Go      string `json:"go"`
	API     string `json:"api"` // for example "cube.v1"
}

// Condition is one probed property of a node. Status is what the last probe saw.
type Condition struct {
	Type   string    `json:"type"` // for example "StorageWritable"
	Status bool      `json:"status"`
	Reason string    `json:"reason"` // one sentence
	Since  time.Time `json:"since"`  // of the last change of Status
}

// NodeStatus is what a node measured of itself. Sizes are in bytes.
type NodeStatus struct {
	Name              string        `json:"name"`
	Version           Version       `json:"version"`
	StartedAt         time.Time     `json:"startedAt"`
	CPUs              int           `json:"cpus"`
	CPUModel          string        `json:"cpuModel"`
	Load1             float64       `json:"load1"`
	MemoryBytes       int64         `json:"memoryBytes"`
	MemoryAvailable   int64         `json:"memoryAvailable"`
	PoolBytes         int64         `json:"poolBytes"`
	PoolUsed          int64         `json:"poolUsed"`
	PoolReflink       bool          `json:"poolReflink"`
	Machine           MachineInfo   `json:"machine"`
	AcceleratorReason string        `json:"acceleratorReason"` // why this accelerator
	Phases            map[Phase]int `json:"phases"`            // sandboxes by phase
	Templates         int           `json:"templates"`
	VMMSlots          int           `json:"vmmSlots"`     // launchers waiting
	NetworkSlots      int           `json:"networkSlots"` // namespaces waiting
	Conditions        []Condition   `json:"conditions"`
}

// Finding is one thing on the host that does not fit what the node knows.
type Finding struct {
	Part   string `json:"part"`             // sandboxes, vmm, network, pool or journal
	Object string `json:"object,omitempty"` // an ID, a path, a name
	Detail string `json:"detail"`           // one sentence
}

// Node is the inbound interface of the node as a whole.
type Node interface {
	Status(ctx context.Context) (NodeStatus, error)
	// Check compares journal, disk and kernel. It changes nothing; no finding means that
	// everything fits. What is being made or deleted at the moment is left out.
	Check(ctx context.Context) ([]Finding, error)
	Version() Version
}
