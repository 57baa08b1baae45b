"""Reports: tables, plots and progress bars. Imports rich and matplotlib, never jax."""
