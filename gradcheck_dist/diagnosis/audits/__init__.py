"""What rules look at besides the weights: clips, copies, backward checks, exchanges of activations."""
