"""The run time of an engine: executors, device state, the request queue and statistics."""
