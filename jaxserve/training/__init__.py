"""Training small Llamas: the net, the loop, checkpoints, and the Hugging Face folder that comes out."""
