"""Engines in processes of their own: what keeps them running, what serves them, and what uses several as one."""
