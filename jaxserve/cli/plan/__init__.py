"""`jaxserve plan`, in parts."""
