"""The day of the GPU: measure kernels and engine in short, resumable stages on a borrowed accelerator."""
