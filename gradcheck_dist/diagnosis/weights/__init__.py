"""The ratio matrix, observed / expected for every contribution, and the shapes and names of what is in it."""
