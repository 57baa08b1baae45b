"""The first product of a gated feed-forward (SwiGLU, GeGLU) and its gate as one operation."""
