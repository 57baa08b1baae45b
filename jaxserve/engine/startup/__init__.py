"""Startup: build the executors, compile every program, measure step times."""
