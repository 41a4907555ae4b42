"""The three ledgers: expected (analytic), nominal (replayed), observed (measured). Numpy only, no torch."""
