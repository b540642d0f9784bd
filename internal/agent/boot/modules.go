package boot

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// moduleCompressed is MODULE_INIT_COMPRESSED_FILE of linux/module.h.
const moduleCompressed = 4

// loadModules loads the files of dir in the order of their names. A module that does not
// load is reported: what it was needed for fails later and says so.
func loadModules(log *slog.Logger, dir string) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		log.Warn("no kernel modules", "err", err)
		return
	}
	for _, e := range entries {
		if err := loadModule(filepath.Join(dir, e.Name())); err != nil {
			log.Warn("load module", "name", e.Name(), "err", err)
		}
	}
}

func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	flags := 0
	if !strings.HasSuffix(path, ".ko") {
		flags = moduleCompressed
	}
	err = unix.FinitModule(int(f.Fd()), "", flags)
	if errors.Is(err, unix.ENOSYS) {
		var image []byte
		if image, err = os.ReadFile(path); err == nil {
			err = unix.InitModule(image, "")
		}
	}
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	return err
}
