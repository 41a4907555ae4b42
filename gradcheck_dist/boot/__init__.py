"""Booting inside somebody's trainer: `gradcheck run` sets one variable, an installed .pth file reads it.

protocol.py   what the variable says
start.py      what the .pth file imports: waits for `import torch`, then attaches
launchers.py  which processes start ranks and train nothing themselves
purelib/      the .pth file; the build back end puts it into site-packages (wheel and editable install alike)

Nothing here imports torch: that is for the user's script to do, when it wants to.
"""
