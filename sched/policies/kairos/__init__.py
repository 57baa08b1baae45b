"""Kairos: urgency-based prefill and slack-guided decoding."""
