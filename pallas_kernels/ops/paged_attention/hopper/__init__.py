"""Paged attention for NVIDIA Hopper (sm_90a) in Pallas Mosaic GPU: decode and prefill."""
