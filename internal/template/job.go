package template

import (
	"context"
	"sync"
	"time"

	cube "github.com/cubesandbox/cubelet"
)

// job is one build that any number of callers wait for. It goes on while at least one
// of them does.
type job struct {
	cancel context.CancelCauseFunc
	feed   *feed
	done   chan struct{} // closed when err and result are set
	result cube.Template
	err    error

	// Guarded by the manager's mutex.
	waiters   int
	abandoned bool // the last waiter left: nobody may join any more
}

func newJob(cancel context.CancelCauseFunc) *job {
	return &job{cancel: cancel, feed: newFeed(), done: make(chan struct{})}
}

// feed keeps the progress of a build for everyone who follows it: each gets every stage,
// and the latest of the byte counts.
type feed struct {
	start time.Time

	mu      sync.Mutex
	events  []event
	seq     int
	bytesAt time.Time     // of the last byte count that was passed on
	changed chan struct{} // closed and replaced at every event
}

type event struct {
	seq int
	cube.TemplateProgress
}

// byteInterval is the least time between two byte counts.
const byteInterval = 100 * time.Millisecond

func newFeed() *feed { return &feed{start: time.Now(), changed: make(chan struct{})} }

// stage begins a stage or says something about it.
func (f *feed) stage(name, message string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.add(cube.TemplateProgress{Stage: name, Message: message}, false)
}

// bytes counts the bytes of a stage.
func (f *feed) bytes(stage string, done, total int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := len(f.events)
	same := n > 0 && f.events[n-1].Stage == stage && f.events[n-1].Message == ""
	if same && done < total && time.Since(f.bytesAt) < byteInterval {
		return
	}
	f.bytesAt = time.Now()
	f.add(cube.TemplateProgress{Stage: stage, Done: done, Total: total}, same)
}

func (f *feed) add(p cube.TemplateProgress, replace bool) {
	p.Elapsed = time.Since(f.start)
	f.seq++
	e := event{f.seq, p}
	if replace {
		f.events[len(f.events)-1] = e
	} else {
		f.events = append(f.events, e)
	}
	close(f.changed)
	f.changed = make(chan struct{})
}

// after returns the events since seq, the last one's seq, and what tells of more.
func (f *feed) after(seq int) ([]cube.TemplateProgress, int, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var news []cube.TemplateProgress
	for _, e := range f.events {
		if e.seq > seq {
			news = append(news, e.TemplateProgress)
		}
	}
	return news, f.seq, f.changed
}

// follow passes the job's progress on and returns its outcome. When ctx ends first, the
// caller stops waiting; the last one to do so ends the build and waits until nothing is
// left of it.
func (m *Manager) follow(ctx context.Context, j *job, progress func(cube.TemplateProgress)) (cube.Template, error) {
	seq := 0
	for {
		news, last, changed := j.feed.after(seq)
		for _, p := range news {
			if progress != nil {
				progress(p)
			}
		}
		seq = last
		select {
		case <-changed:
			continue
		default:
		}
		select {
		case <-changed:
		case <-j.done:
			m.leave(j)
			if news, _, _ := j.feed.after(seq); progress != nil {
				for _, p := range news {
					progress(p)
				}
			}
			return j.result, j.err
		case <-ctx.Done():
			if m.leave(j) {
				<-j.done
			}
			return cube.Template{}, context.Cause(ctx)
		}
	}
}

// leave takes one waiter from the job and reports whether that ended it.
func (m *Manager) leave(j *job) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if j.waiters--; j.waiters > 0 || j.abandoned {
		return false
	}
	j.abandoned = true
	j.cancel(errAbandoned)
	return true
}
