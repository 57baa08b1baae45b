"""Running models: meshes, memory, steps, and the executors that a scheduler drives."""
