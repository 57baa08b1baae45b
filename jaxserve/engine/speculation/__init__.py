"""Drafters: what proposes tokens that the next step verifies."""
