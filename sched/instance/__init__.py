"""The scheduler of one instance: queues, KV pages, step building and the loop."""
