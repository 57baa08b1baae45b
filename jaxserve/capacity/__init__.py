"""Capacity planning: what a model needs and what a device has, without weights or devices."""
