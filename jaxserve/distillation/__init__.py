"""Training of a small draft model on the outputs of its target (`jaxserve distill`)."""
