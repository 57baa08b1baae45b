"""Write the keys and values of a step to their pages, with RoPE and quantization."""
