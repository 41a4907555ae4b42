"""The verdict of a step, why it is left open, and what the other steps of a run say of it."""
