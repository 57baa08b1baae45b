"""What runs steps: executors, the state they hold on their devices, queues and statistics."""
