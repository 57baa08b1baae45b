"""Simulation: the scheduler that serves, on a virtual clock and a model of the devices."""
