"""The screens: watch a run live, replay it, walk to the divergence. The only importer of textual; imports no torch.

A worker thread reads and judges (source), hands over a frozen snapshot, one message carries it, screens show it.
"""
