"""Judging a run step by step, in bounded memory, whatever its length. Imports no torch."""
