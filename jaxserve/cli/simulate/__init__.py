"""`jaxserve simulate`: the command, its flags, its results, and how it shows them."""
