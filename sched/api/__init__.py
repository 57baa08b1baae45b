"""The vocabulary of the scheduler: the types that policies, routers and executors share."""
