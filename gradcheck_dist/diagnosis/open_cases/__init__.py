"""Wrong weights that are no finding, each kind with the reason why."""
