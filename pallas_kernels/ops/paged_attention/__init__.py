"""Attention of ragged rows of tokens to pages of keys and values."""
