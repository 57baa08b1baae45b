"""The engine: meshes, KV memory, step programs, and the executors that schedulers drive."""
