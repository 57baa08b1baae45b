"""The parts of `ServeConfig`: fields, objectives, speculation, and other engines' names of settings."""
