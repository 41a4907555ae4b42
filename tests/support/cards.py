"""Two devices that are no CPU, on any machine with a C++ compiler: `card:0` and `card:1` (cards.cpp).

Their tensors are not the host's, and do not mix: what probes do on an accelerator can be tried in one process, as far
as no kernel, stream or process group takes part. Copies to the host arrive at the second look.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sysconfig
import types
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

COMPILER = shutil.which("c++")
NUM_CARDS = 2


def build(folder: Path) -> Path:
    """The library; takes half a minute."""
    assert COMPILER is not None
    library = folder / "cards.so"
    includes = [f"-I{path}" for path in [*cpp_extension.include_paths(), sysconfig.get_path("include")]]
    flags = [
        "-shared",
        "-fPIC",
        "-std=c++20",
        "-O1",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    source = str(Path(__file__).with_suffix(".cpp"))
    command = [COMPILER, *flags, *includes, source, "-o", str(library), *libraries, "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True, timeout=300)
    return library


class Event:
    """Of a copy that is there at the second look."""

    def __init__(self) -> None:
        self._asked = 0

    def record(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        self._asked += 1
        return self._asked > 1

    def synchronize(self) -> None:
        self._asked = 1


def register(library: Path) -> None:
    """Make the devices known to torch, in this process for good."""
    cards = ctypes.CDLL(str(library))
    cards.register_cards()
    torch.utils.rename_privateuse1_backend("card")
    module: Any = types.ModuleType("torch.card")
    module.Event = Event
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: NUM_CARDS
    module.current_device, module.set_device = cards.current_card, cards.set_card
    module.current_stream = lambda device=None: device
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.get_rng_state = lambda *_: torch.get_rng_state()
    module.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    torch._register_device_module("card", module)
