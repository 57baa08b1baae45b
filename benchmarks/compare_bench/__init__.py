"""What `compare.py` is made of: the sides of a comparison, each in a process of its own."""
