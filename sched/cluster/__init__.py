"""Several instances: KV transfers between them, and predictions of first tokens."""
