"""Products with 8-bit weights."""
