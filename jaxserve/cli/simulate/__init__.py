"""`jaxserve simulate`: the command, its flags, results and reports."""
