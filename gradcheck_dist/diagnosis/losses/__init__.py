"""What the losses of a step aim at, and what they did wrong themselves."""
