"""SLOs-Serve (arXiv 2504.08784): the policy and the dynamic program behind it."""
