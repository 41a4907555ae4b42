"""Text comes in whole or is refused, and every layout sees the same tokens."""

import json
from pathlib import Path

import pytest

from gradcheck_dist.axes import Axes
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.data import IGNORE_INDEX, DataLoader
from gradcheck_dist.trainer.documents import BOS, EOS, PAD, encode, read_documents


def test_python_itself_brings_documents_of_very_different_length() -> None:
    lengths = sorted(map(len, read_documents(None)))
    assert len(lengths) > 1000
    assert 0 < lengths[0] < 20
    assert lengths[-1] > 1000


def test_a_text_file_is_divided_by_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("one\ntwo\n \n\n\nthree\n")
    assert read_documents(str(tmp_path / "text")) == [b"one\ntwo", b"three"]


def test_jsonl_gives_a_document_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one\\n\\ntwo"}\n\n{"text": "three", "id": 3}\n')
    assert read_documents(str(tmp_path / "a.jsonl")) == [b"one\n\ntwo", b"three"]


def test_a_folder_gives_whole_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "b.txt").write_text("b\n\nb")
    (tmp_path / "below" / "a.jsonl").write_text('{"text": "a"}')
    (tmp_path / "c.bin").write_bytes(b"\x00")
    (tmp_path / "empty.txt").write_text(" \n")
    assert read_documents(str(tmp_path)) == [b"b\n\nb", b"a"]


@pytest.mark.parametrize(
    ("name", "content", "code", "words"),
    [
        ("empty.txt", b" \n\n ", "E222", "no text in data"),
        ("binary.txt", b"ab\xff\xfe", "E222", "byte 2 is not UTF-8"),
        ("nul.txt", b"ab\0", "E222", "byte 2 is NUL"),
        ("list.jsonl", b"[1]\n", "E222", "list.jsonl:1 has no 'text' field.*found: list"),
        ("other.jsonl", b'{"text": "a"}\n{"body": "b"}\n', "E222", "other.jsonl:2 has no 'text' field.*found: 'body'"),
        ("number.jsonl", b'{"text": 1}\n', "E222", "has no 'text' field with a string"),
        ("broken.jsonl", b"{\n", "E222", "broken.jsonl:1 is not JSON"),
    ],
)
def test_data_without_text_is_refused(tmp_path: Path, name: str, content: bytes, code: str, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(GradcheckError, match=words) as caught:
        read_documents(str(tmp_path / name))
    assert caught.value.code == code


def test_missing_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GradcheckError, match="does not exist"):
        read_documents(str(tmp_path / "nothing"))
    with pytest.raises(GradcheckError, match=r"holds no file named \*.txt"):
        read_documents(str(tmp_path))


def test_a_short_document_has_an_end_and_a_long_one_is_cut() -> None:
    assert encode(b"ab", seq_len=4) == [BOS, 97, 98, EOS]
    assert encode(b"abc", seq_len=4) == [BOS, 97, 98, 99, EOS]
    assert encode(b"abcd", seq_len=4) == [BOS, 97, 98, 99, 100]


def test_padding_is_no_label(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("ab")
    batch = DataLoader(TrainConfig(data=str(tmp_path / "text"), batch_size=1, seq_len=5)).step_batches(0, 0)[0]
    assert batch.tokens.tolist() == [[BOS, 97, 98, EOS, PAD]]
    assert batch.labels.tolist() == [[97, 98, EOS, IGNORE_INDEX, IGNORE_INDEX]]
    assert batch.num_tokens == 3


def test_token_counts_differ_between_ranks_and_microbatches() -> None:
    loader = DataLoader(TrainConfig(axes=Axes(dp_replicate=2), accum=3))
    counts = [batch.num_tokens for rank in range(2) for batch in loader.step_batches(0, rank)]
    assert len(set(counts)) == len(counts)


@pytest.mark.parametrize("step", [0, 1])
def test_every_layout_sees_the_same_sequences_in_a_step(step: int) -> None:
    def sequences(config: TrainConfig) -> list[list[int]]:
        loader = DataLoader(config)
        ranks = range(config.axes.data_parallel_degree)
        return sorted(
            row for rank in ranks for batch in loader.step_batches(step, rank) for row in batch.tokens.tolist()
        )

    layouts = [
        TrainConfig(accum=12, batch_size=1),
        TrainConfig(axes=Axes(dp_replicate=2), accum=3),
        TrainConfig(axes=Axes(pp=2), accum=2, microbatches=3),
        TrainConfig(axes=Axes(dp_shard=2, pp=2), microbatches=3),
    ]
    first, *others = map(sequences, layouts)
    assert len(first) == 12
    assert all(other == first for other in others)


def test_the_seed_changes_the_order(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": str(number)}) for number in range(100)))
    config = {"data": str(tmp_path / "a.jsonl"), "batch_size": 10}
    first, again, other = (
        DataLoader(TrainConfig.from_dict(config | {"seed": seed})).step_batches(0, 0)[0].tokens.tolist()
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_second_pass_over_the_documents_has_another_order(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("\n\n".join(map(str, range(10, 30))))
    loader = DataLoader(TrainConfig(data=str(tmp_path / "text"), batch_size=20, seq_len=4))
    first, second = (loader.step_batches(step, 0)[0].tokens.tolist() for step in (0, 1))
    assert sorted(first) == sorted(second)
    assert first != second
