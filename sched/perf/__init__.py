"""Step-time models: how long a step will take, said before and corrected after."""
