"""Copy pages of all layers out of the KV pools and into them."""
