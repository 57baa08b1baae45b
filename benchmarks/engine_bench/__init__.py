"""Measurements of single executors: steps are made and submitted here, without a scheduler."""
