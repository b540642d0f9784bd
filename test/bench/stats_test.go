package main

import (
	"errors"
	"testing"
	"time"
)

func TestQuantilesAreNearestRanks(t *testing.T) {
	var ds []time.Duration
	for i := 100; i >= 1; i-- {
		ds = append(ds, time.Duration(i))
	}
	s := summary("x", ds, []error{errors.New("boom")})
	if s.P50 != 50 || s.P99 != 99 || s.Max != 100 || s.N != 101 || s.Failures != 1 || s.FirstErr != "boom" {
		t.Errorf("summary = %+v", s)
	}
	if s := summary("x", []time.Duration{7}, nil); s.P50 != 7 || s.P99 != 7 || s.Max != 7 {
		t.Errorf("of one = %+v", s)
	}
	if s := summary("x", nil, []error{errors.New("boom")}); s.N != 1 || s.P50 != 0 {
		t.Errorf("of none = %+v", s)
	}
}
