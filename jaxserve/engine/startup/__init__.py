"""From settings to a warm engine: build, compile, measure."""
