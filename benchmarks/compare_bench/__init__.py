"""The parts of `compare.py`: the compared engines, each in a process of its own."""
