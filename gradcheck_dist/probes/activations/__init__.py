"""What ranks and stages exchange in forward, and what comes back through it."""
