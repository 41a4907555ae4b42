"""Who is who, where parameters and their gradients lie, and which of their elements are sampled."""
