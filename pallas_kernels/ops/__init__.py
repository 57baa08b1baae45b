"""The operations that XLA would not compute well by itself, one folder each."""
