package containerd

import (
	"context"
	"io"
	"log/slog"

	"github.com/sirupsen/logrus"
)

// redirectLog sends the log of containerd's libraries, which is logrus's global one,
// to the given logger, one level lower than containerd has it unless it is an error:
// its lines tell about its insides, and it warns about what is normal here (cgroup v1,
// no fs-verity). logrus itself stays at its info level, because a shim started
// at debug level opens a debug socket.
func redirectLog(log *slog.Logger) {
	std := logrus.StandardLogger()
	std.SetOutput(io.Discard)
	std.SetLevel(logrus.InfoLevel)
	// A listener that is closed while it starts ends in log.Fatal: a server that is
	// stopped early must not take the daemon along. One that really fails shows in the
	// health probe.
	std.ExitFunc = func(int) {}
	hooks := make(logrus.LevelHooks)
	hooks.Add(logHook{log.With("component", "containerd")})
	std.ReplaceHooks(hooks)
}

type logHook struct{ log *slog.Logger }

func (logHook) Levels() []logrus.Level { return logrus.AllLevels }

func (h logHook) Fire(e *logrus.Entry) error {
	level := slog.LevelDebug
	switch {
	case e.Level <= logrus.ErrorLevel:
		level = slog.LevelError
	case e.Level == logrus.WarnLevel:
		level = slog.LevelInfo
	}
	attrs := make([]slog.Attr, 0, len(e.Data))
	for k, v := range e.Data {
		attrs = append(attrs, slog.Any(k, v))
	}
	ctx := e.Context
	if ctx == nil {
		ctx = context.Background()
	}
	h.log.LogAttrs(ctx, level, e.Message, attrs...)
	return nil
}
