"""What all judged steps come to: the report of a run."""
