"""The analytic model on its own: what a configuration does to each weight, without starting a process. No torch."""
