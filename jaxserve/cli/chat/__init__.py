"""`jaxserve chat`: talk to an OpenAI-compatible server in a terminal."""
