package main

import (
	"fmt"
	"slices"
	"sync"
	"time"
)

// series is the outcome of one measured operation, repeated.
type series struct {
	Name     string        `json:"name"`
	N        int           `json:"n"`        // attempts
	Failures int           `json:"failures"` // attempts that failed
	P50      time.Duration `json:"p50"`      // nanoseconds, over the successes
	P99      time.Duration `json:"p99"`
	Max      time.Duration `json:"max"`
	Goal     string        `json:"goal,omitempty"`
	FirstErr string        `json:"firstError,omitempty"`
}

// summary condenses the durations of the successes.
func summary(name string, ds []time.Duration, failures []error) series {
	s := series{Name: name, N: len(ds) + len(failures), Failures: len(failures)}
	if len(failures) > 0 {
		s.FirstErr = failures[0].Error()
	}
	if len(ds) == 0 {
		return s
	}
	ds = slices.Sorted(slices.Values(ds))
	s.P50, s.P99, s.Max = quantile(ds, 0.50), quantile(ds, 0.99), ds[len(ds)-1]
	return s
}

// quantile returns the smallest value that at least a share q of the sorted values
// does not exceed (nearest rank).
func quantile(sorted []time.Duration, q float64) time.Duration {
	rank := int(float64(len(sorted))*q+0.999999) - 1
	return sorted[min(max(rank, 0), len(sorted)-1)]
}

// samples collects durations of several series from several goroutines.
type samples struct {
	mu   sync.Mutex
	byID map[string][]time.Duration
	errs map[string][]error
}

func newSamples() *samples {
	return &samples{byID: map[string][]time.Duration{}, errs: map[string][]error{}}
}

func (s *samples) add(name string, d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.byID[name] = append(s.byID[name], d)
}

func (s *samples) fail(name string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.errs[name] = append(s.errs[name], err)
}

func (s *samples) series(name, goal string) series {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := summary(name, s.byID[name], s.errs[name])
	r.Goal = goal
	return r
}

func ms(d time.Duration) string { return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1000) }
