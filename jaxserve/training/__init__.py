"""Training of small Llamas: the net, the loop, checkpoints, and export to a Hugging Face folder."""
