package runc

import (
	"sync"

	cube "github.com/cubesandbox/cubelet"
)

// uids hands out user IDs of a range. The search goes round, so that an ID comes back
// as late as possible.
type uids struct {
	base, count int

	mu   sync.Mutex
	next int
	used map[int]bool
}

func (u *uids) take() (int, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for i := range u.count {
		uid := u.base + (u.next+i)%u.count
		if !u.used[uid] {
			u.used[uid] = true
			u.next = (uid - u.base + 1) % u.count
			return uid, nil
		}
	}
	e := cube.Errorf(cube.CodeResourceExhausted, "all %d user IDs of VMMs are in use", u.count)
	return 0, e.WithHint("delete sandboxes, or give the node a larger range of user IDs")
}

// reserve marks an ID as used; the newest slots of an earlier daemon thereby also set
// where the search begins.
func (u *uids) reserve(uid int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.used[uid] = true
	if uid >= u.base && uid < u.base+u.count && uid-u.base+1 > u.next {
		u.next = (uid - u.base + 1) % u.count
	}
}

// free gives an ID back. The caller has removed everything that it owned.
func (u *uids) free(uid int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.used, uid)
}
