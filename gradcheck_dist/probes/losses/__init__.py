"""Losses: on how many tokens, with what weight, by which line."""
