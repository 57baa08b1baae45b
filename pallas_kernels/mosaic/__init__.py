"""What several Mosaic kernels share: versions of jax, the interpreter, PTX, fragments, shared memory."""
