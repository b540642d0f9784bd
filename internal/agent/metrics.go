package agent

import (
	"math"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// metricsBody is the answer of /metrics. Sizes are in bytes where not named otherwise.
type metricsBody struct {
	TS         int64   `json:"ts"`
	CPUCount   int     `json:"cpu_count"`
	CPUUsedPct float64 `json:"cpu_used_pct"`
	MemTotal   uint64  `json:"mem_total"`
	MemUsed    uint64  `json:"mem_used"`
	MemCache   uint64  `json:"mem_cache"`
	MemTotalMB uint64  `json:"mem_total_mib"`
	MemUsedMB  uint64  `json:"mem_used_mib"`
	DiskTotal  uint64  `json:"disk_total"`
	DiskUsed   uint64  `json:"disk_used"`
}

func (s *Server) metrics(w http.ResponseWriter, r *http.Request) {
	if !allow(w, r, http.MethodGet) {
		return
	}
	m := metricsBody{TS: time.Now().Unix(), CPUCount: runtime.NumCPU(), CPUUsedPct: s.cpu.sample()}
	mem := memInfo()
	m.MemTotal, m.MemCache = mem["MemTotal"], mem["Cached"]
	if available := mem["MemAvailable"]; available < m.MemTotal {
		m.MemUsed = m.MemTotal - available
	}
	m.MemTotalMB, m.MemUsedMB = m.MemTotal>>20, m.MemUsed>>20
	var st syscall.Statfs_t
	if err := syscall.Statfs("/", &st); err == nil {
		m.DiskTotal = st.Blocks * uint64(st.Bsize)
		m.DiskUsed = (st.Blocks - st.Bfree) * uint64(st.Bsize)
	}
	w.Header().Set("Cache-Control", "no-store")
	writeJSON(w, http.StatusOK, m)
}

// memInfo returns /proc/meminfo in bytes.
func memInfo() map[string]uint64 {
	info := map[string]uint64{}
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return info
	}
	for line := range strings.Lines(string(b)) {
		key, rest, _ := strings.Cut(line, ":")
		if f := strings.Fields(rest); len(f) > 0 {
			n, _ := strconv.ParseUint(f[0], 10, 64)
			info[key] = n << 10
		}
	}
	return info
}

// cpuSampler measures how busy the processors were since the sample before.
type cpuSampler struct {
	mu          sync.Mutex
	busy, total uint64
}

func (c *cpuSampler) sample() float64 {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	line, _, _ := strings.Cut(string(b), "\n")
	var busy, total uint64
	for i, f := range strings.Fields(strings.TrimPrefix(line, "cpu")) {
		n, _ := strconv.ParseUint(f, 10, 64)
		const idle, iowait, guest = 3, 4, 8 // guest time is counted as user time already
		if i >= guest {
			break
		}
		total += n
		if i != idle && i != iowait {
			busy += n
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	dBusy, dTotal := busy-c.busy, total-c.total
	c.busy, c.total = busy, total
	if dTotal == 0 || dBusy > dTotal {
		return 0
	}
	return math.Round(float64(dBusy)/float64(dTotal)*10000) / 100
}
