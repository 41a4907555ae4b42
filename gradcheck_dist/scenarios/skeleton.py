"""The beginning of a scenario file, for a bug that somebody wants to keep."""

from __future__ import annotations

SKELETON = """\
# `gradcheck scenario {name} --library DIR` runs this file. Everything below runs as it stands; replace it by your bug.
name: {name}
title: What goes wrong, in one line
story: >
  Who scales the gradient by what, why each hand looks right alone, and what it does to the training.
citations: []            # owner/repository#number of the threads that tell of it
# torch: ["2.13"]        # only for a bug of torch's own: the versions that it was seen on
objective: global-token-mean
mesh:                    # a degree for each axis, and nproc for the one that takes all remaining ranks
  dp_replicate: nproc
defaults:                # what --nproc, --accum, --microbatches, --steps and --seed replace
  nproc: 2
  accum: 3
# fixed_sizes: [accum]   # those of them that have to stay, for with others this is another bug
config: {{}}               # keys of gradcheck_dist/trainer/config.py for all variants, as {{optimizer: sgd}}

variants:
  broken:
    story: The loss is divided by the tokens of all ranks, and DDP averages over the ranks once more.
    faults: [ddp-averages]         # gradcheck_dist/trainer/faults.py; several are put in together
    config: {{}}                     # keys of the trainer for this variant alone
    expect:                        # or a list of such, or gradients-right where nothing may be found
      code: GS101
      name: double-averaging
      ratio: 1/R                   # observed / expected of every weight, out of R K M S N N_r n_c k m r h and the axes
      # terms: load_balance        # auxiliary loss terms whose ratio it is, where the main loss is right
      # parameters: layers.0.*     # those that it concerns, where it does not concern all
      # from_step: 1               # the first step that it is found in, where that is not the first of all
      # factor: 1/dp_replicate     # what the factor has to be called
      culprit:                     # kind of the event, end of its file's path, a part of its line
        kind: reduce
        file: gradcheck_dist/trainer/loop.py
        line: loss.backward()
  fixed:
    story: What the mended trainer does.
    expect: clean
"""


def skeleton(name: str) -> str:
    """A scenario file that runs as it stands."""
    return SKELETON.format(name=name)
