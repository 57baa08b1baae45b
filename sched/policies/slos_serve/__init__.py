"""SLOs-Serve (arXiv 2504.08784): the policy and its dynamic program."""
