"""Who is to blame: accounts of weights, the cheapest explanation of all of them, its culprits, and cases by culprit."""
