"""Text to train on: documents, read and turned into byte tokens.

Imports no torch, so that bad data is refused before any process starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from gradcheck_dist.errors import GradcheckError

BOS, EOS, PAD = 256, 257, 258
VOCAB_SIZE = 259
"""The 256 bytes, begin and end of a document, padding."""

_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")
_TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
_JSONL_SUFFIXES = (".jsonl", ".ndjson")
_LEGAL = "Legal are UTF-8 text files, JSONL files with a 'text' field, and folders of them."


def read_documents(data: str | None) -> list[bytes]:
    """The documents of a data source, in a fixed order, each at least one byte long.

    Args:
        data: a text file (a document is a paragraph: blank lines divide), a JSONL file (a document is the "text" of a
            line) or a folder, searched in depth (a document is a whole text file, or a line of JSONL). None takes the
            paragraphs of the language reference that lies in every Python installation: some 2,600 pieces of English
            from 3 bytes to 4 kB, so that token counts differ between ranks as they do in life.

    Raises:
        GradcheckError: the source is missing, empty, not text, or JSONL without text (E221, E222).

    Source: pydoc_data.topics of the Python standard library.
    """
    if data is None:
        from pydoc_data.topics import topics

        documents = [part for name in sorted(topics) for part in _paragraphs(topics[name].encode())]
    else:
        documents = list(_from_path(Path(data)))
    if not documents:
        raise GradcheckError(f"no text in data {data!r}: every document in it is empty. {_LEGAL}", code="E222")
    return documents


def encode(document: bytes, seq_len: int) -> list[int]:
    """At most seq_len + 1 token ids: BOS, bytes, and EOS where the document ends within them."""
    tokens = [BOS, *document[:seq_len]]
    if len(tokens) <= seq_len:
        tokens.append(EOS)
    return tokens


def _from_path(path: Path) -> Iterator[bytes]:
    if path.is_dir():
        suffixes = _TEXT_SUFFIXES + _JSONL_SUFFIXES
        files = sorted(file for file in path.rglob("*") if file.suffix in suffixes and file.is_file())
        if not files:
            raise GradcheckError(
                f"data folder {str(path)!r} holds no file named {', '.join('*' + suffix for suffix in suffixes)}. "
                "Name the file itself if it has another ending.",
                code="E221",
            )
        for file in files:
            yield from _from_jsonl(file) if file.suffix in _JSONL_SUFFIXES else filter(None, [_read(file).strip()])
    elif path.suffix in _JSONL_SUFFIXES:
        yield from _from_jsonl(path)
    else:
        yield from _paragraphs(_read(path))


def _paragraphs(text: bytes) -> list[bytes]:
    return [part for part in map(bytes.strip, _BLANK_LINE.split(text)) if part]


def _from_jsonl(path: Path) -> Iterator[bytes]:
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise GradcheckError(f"{path}:{number} is not JSON: {error}. {_LEGAL}", code="E222") from error
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            found = ", ".join(map(repr, record)) if isinstance(record, dict) else type(record).__name__
            raise GradcheckError(
                f"{path}:{number} has no 'text' field with a string; found: {found or 'nothing'}. {_LEGAL}", code="E222"
            )
        if text.strip():
            yield text.strip().encode()


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise GradcheckError(f"data {str(path)!r} does not exist. {_LEGAL}", code="E221") from None
    except OSError as error:
        raise GradcheckError(f"data {str(path)!r} cannot be read: {error.strerror}. {_LEGAL}", code="E221") from error
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise GradcheckError(
            f"data {str(path)!r} is not text: byte {error.start} is not UTF-8. {_LEGAL}", code="E222"
        ) from error
    if b"\0" in content:
        raise GradcheckError(f"data {str(path)!r} is not text: byte {content.index(0)} is NUL. {_LEGAL}", code="E222")
    return content
