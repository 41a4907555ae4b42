"""Scenarios: known bugs as documents that run. Each names what must be found, and a healthy twin on which nothing may.

Importing this package imports no torch.
"""
