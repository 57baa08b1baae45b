"""Write the keys and values of a step to their pages, rotated and quantised on the way."""
