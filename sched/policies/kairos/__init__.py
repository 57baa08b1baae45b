"""Kairos: its prefill order and its slack-guided decoding."""
