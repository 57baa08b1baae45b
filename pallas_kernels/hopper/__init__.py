"""Kernels for NVIDIA Hopper (sm_90a) in Pallas Mosaic GPU: warpgroups, TMA copies and barriers, written out."""
