"""From ledgers to findings. Numpy only, no torch."""
