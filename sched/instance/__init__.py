"""One instance: its queues, its KV pages, and the loop that turns decisions into steps."""
