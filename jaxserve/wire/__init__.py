"""Connections between processes of one deployment: addresses, frames, proof of a shared key."""
