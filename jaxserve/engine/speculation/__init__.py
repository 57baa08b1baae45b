"""Drafters: they propose tokens that the next step verifies."""
