"""Structured outputs: which tokens may come next, so that an output matches its schema, expression or grammar."""
