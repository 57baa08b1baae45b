"""The version, for those who want to know it without importing anything else."""

__version__ = "0.1.0"
