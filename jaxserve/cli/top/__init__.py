"""`jaxserve top`: a live table of a server, from its metrics."""
