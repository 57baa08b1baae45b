"""What people look at: tables, plots and progress bars. Imports rich and matplotlib, never jax."""
