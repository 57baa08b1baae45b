"""The attention of an engine: RoPE, KV write, paged attention or MLA, and sinks, by one backend."""
