"""Backward passes and the leaves that they reach."""
