"""Norms, clips, and what a fault does to the gradient of a step."""
