"""Checkpoints that others have quantized: how they declare it, and readers of their tensors, one packing a file."""
