"""Gradients that ranks reduce, and whether they hold copies."""
