"""What optimizers read, clips and norms, and what else is done to gradients before a step."""
