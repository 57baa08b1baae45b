"""What several Mosaic kernels share: jax versions, the interpreter, PTX, fragments, shared memory."""
