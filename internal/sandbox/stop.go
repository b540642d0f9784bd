package sandbox

import (
	"context"

	cube "github.com/cubesandbox/cubelet"
)

// Stop implements cube.Lifecycle.
func (m *Manager) Stop(context.Context, string) (cube.Sandbox, error) {
	return cube.Sandbox{}, errNoColdBoot("stop")
}

// Start implements cube.Lifecycle.
func (m *Manager) Start(context.Context, string) (cube.Sandbox, error) {
	return cube.Sandbox{}, errNoColdBoot("start")
}

func errNoColdBoot(verb string) error {
	return cube.Errorf(cube.CodeUnimplemented, "%s is not built yet", verb).WithHint("pause and resume keep a sandbox without its memory on the host")
}
