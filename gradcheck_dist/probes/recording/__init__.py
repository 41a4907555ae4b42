"""The state of a recording, and what every probe needs: patches, samples, sites, numbers that come later."""
