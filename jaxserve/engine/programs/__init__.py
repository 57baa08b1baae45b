"""The compiled programs of a step, their inputs, and the meshes and kernels that they use."""
