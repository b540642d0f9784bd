package cli

import (
	"github.com/spf13/cobra"
)

func (a *app) template() *cobra.Command {
	return group("template", "Make and manage templates", `  cubecli template create --name base registry.example.org/base:1
  cubecli template list`,
		a.templateCreate(), a.templateList(), a.templateInspect(), a.templateDelete())
}
