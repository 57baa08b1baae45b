"""Training a small draft on a model's own outputs (`jaxserve distill`)."""
