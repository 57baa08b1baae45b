"""Engines in processes of their own: the messages, both ends of a connection, and the processes."""
