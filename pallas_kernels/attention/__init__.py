"""The attention of an engine: rope, KV write, paged attention or MLA, and sinks, by one backend."""
