"""The vocabulary of the scheduler: what policies, routers and executors see and say."""
