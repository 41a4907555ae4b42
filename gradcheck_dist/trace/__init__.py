"""Trace files: one append-only file a rank, readable while it is written. Imports no torch."""
