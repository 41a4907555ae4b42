"""Sampling and statistics of gradients."""
