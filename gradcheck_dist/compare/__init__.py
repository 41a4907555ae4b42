"""Runs against runs: curves of loss, gradient norm and tokens out of runs, TensorBoard logs and CSV, and their ratio.

Works on logs of jobs that never had a probe. Imports no torch.
"""
