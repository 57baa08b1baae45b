"""Runs, simulated or served, as they were recorded: the record, its timeline, and the life of a request."""
