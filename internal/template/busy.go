package template

// Busy lists the owners of the host objects of builds under way, and the templates
// that are being built.
func (m *Manager) Busy() (owners map[string]bool, building []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	owners = map[string]bool{}
	for id, b := range m.building {
		building = append(building, id)
		owners[id+"-"+sizeName(b.spec.Resources)] = true
	}
	for id, t := range m.templates {
		for size := range t.flights {
			owners[id+"-"+size] = true
		}
	}
	return owners, building
}
