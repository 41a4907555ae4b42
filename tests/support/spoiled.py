"""Traces as accidents and strangers leave them."""

from __future__ import annotations

import random

from gradcheck_dist.trace.frames import MAGIC, Damage, frame, iter_frames


def spoil(data: bytes, generator: random.Random) -> bytes:
    """Cut off, with bits flipped or with foreign bytes inside: what a checksum tells."""
    spoiled = bytearray(data)
    if generator.random() < 0.4:
        del spoiled[generator.randrange(len(spoiled)) :]
    for _ in range(generator.randrange(6)):
        if spoiled:
            spoiled[generator.randrange(len(spoiled))] ^= 1 << generator.randrange(8)
    if spoiled and generator.random() < 0.1:
        at = generator.randrange(len(spoiled))
        spoiled[at:at] = generator.randbytes(generator.randrange(200))
    return bytes(spoiled)


def forge(data: bytes, generator: random.Random) -> bytes:
    """Frames with right checksums and wrong bytes inside, and some of them missing: what no checksum tells."""
    forged = MAGIC
    for piece, _ in iter_frames(data, len(MAGIC)):
        payload = bytearray() if isinstance(piece, Damage) else bytearray(piece)
        if not payload or generator.random() < 0.1:
            continue
        if generator.random() < 0.5:
            for _ in range(generator.randrange(1, 4)):
                payload[generator.randrange(len(payload))] = generator.randrange(256)
        forged += frame(bytes(payload))
    return forged
