package agent

import "fmt"

func (m *fakeMachine) MakeDir(path string, uid, gid int) error {
	return m.note("dir %s %s", path, fmt.Sprint(uid, ":", gid))
}
