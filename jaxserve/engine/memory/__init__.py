"""The KV pools of an instance: their size, their scales, and moving pages between instances."""
