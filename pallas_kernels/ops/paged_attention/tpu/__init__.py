"""Paged attention for TPU in Pallas Mosaic: decode and prefill."""
