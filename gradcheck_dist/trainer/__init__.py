"""A small Llama trainer that runs on any layout of ranks, and faults that break it in known ways.

Importing this package, `config`, `faults` and `launch` costs no torch; `loop` and what it uses do.
"""
