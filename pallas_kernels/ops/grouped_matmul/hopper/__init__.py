"""The grouped product for NVIDIA Hopper in Pallas Mosaic GPU."""
