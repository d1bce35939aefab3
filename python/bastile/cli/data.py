"""What users give to train on, as tokenised examples: a text, chats, or a data set of the hub."""

import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from bastile.cli import chats
from bastile.cli.errors import UsageError
from bastile.cli.examples import Examples
from bastile.cli.options import need_packages

_LIBRARY_BYTES = 4_000_000  # enough that the demo on a CPU sees no text twice; its BPE trains in seconds
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


def load(given: str, split: str, tokenizer: Any, length: int) -> tuple[Examples, str]:
    """The examples, and a sentence on what they are.

    given: a file that ends in .jsonl, with a chat ({"messages": [...]}) or a text ({"text": "..."}) on each line;
    another file, a text; or else the name of a data set, which has a column of one of these names."""
    path = Path(given)
    if path.suffix == ".jsonl":
        return _of_rows(_json_lines(path), given, tokenizer, length)
    if path.is_file() or path.suffix:
        return _of_text(read_text(path), tokenizer, length)
    return _of_rows(_data_set(given, split), given, tokenizer, length)


def _of_text(text: str, tokenizer: Any, length: int) -> tuple[Examples, str]:
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return Examples.of_text(ids, length), f"a text of {len(ids):,} tokens"


def _of_rows(rows: Iterable[tuple[str, Any]], given: str, tokenizer: Any, length: int) -> tuple[Examples, str]:
    """Rows that all hold chats, or all hold texts, which are put end to end."""
    found = list(rows)
    if not found:
        raise UsageError(f"--data {given}: holds no rows")
    kind = next((key for key in ("messages", "text") if key in found[0][1]), None)
    if kind is None:
        raise UsageError(f"{found[0][0]}: needs 'messages' or 'text'; it has {', '.join(found[0][1]) or 'nothing'}")
    for where, row in found:
        if kind not in row:
            raise UsageError(f"{where}: has no '{kind}', which the first row has")
    if kind == "messages":
        pairs = list(chats.tokenize(((where, row[kind]) for where, row in found), tokenizer, length))
        if not pairs:
            raise UsageError(f"--data {given}: no chat has an answer of the assistant within {length} tokens")
        left_out = len(found) - len(pairs)
        note = f", {left_out:,} left out (no answer within {length} tokens)" if left_out else ""
        return Examples.of_sequences(pairs), f"{len(pairs):,} chats{note}"
    for where, row in found:
        if not isinstance(row[kind], str):
            raise UsageError(f"{where}: 'text' must be text")
    return _of_text((tokenizer.eos_token or "\n").join(row[kind] for _, row in found), tokenizer, length)


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(read_text(path).split("\n"), 1):  # splitlines would also cut within a text
        if line.strip():
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UsageError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
            if not isinstance(row, dict):
                raise UsageError(f'{where}: must be an object, such as {{"messages": [...]}}')
            yield where, row


def _data_set(name: str, split: str) -> Iterator[tuple[str, Any]]:
    what = "a folder" if Path(name).is_dir() else "no such file"
    need_packages("datasets", purpose=f"--data {name} ({what}, so read as a data set)")
    import datasets

    try:
        rows = datasets.load_dataset(name, split=split)
    except Exception as error:  # each loader of that library raises what it likes
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UsageError(f"--data {name}: neither a file nor a data set with the split {split} ({reason})") from error
    for number, row in enumerate(rows):
        yield f"{name}, row {number}", row


def read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")  # a mark that some editors put first is no text
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); give the path of a text file") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text in UTF-8 (byte {error.start}); convert it first") from error
    if not text.strip():
        raise UsageError(f"{path} holds no text")
    return text


def standard_library_text() -> str:
    """The first few megabytes of the Python standard library's sources, in alphabetical order."""
    folder = Path(sysconfig.get_path("stdlib"))
    parts, size = [], 0
    for path in sorted(folder.rglob("*.py")):
        if _LEFT_OUT.isdisjoint(path.relative_to(folder).parts):
            parts.append(path.read_text(encoding="utf-8", errors="replace"))
            size += len(parts[-1])
            if size >= _LIBRARY_BYTES:
                break
    if not parts:
        raise UsageError(f"no Python sources under {folder}; give a text with --text")
    return "\n".join(parts)


def tokens_of(text: str, vocabulary: int) -> tuple[Any, torch.Tensor]:
    """A tokenizer of its own for the text, and its tokens."""
    print(f"Training a BPE vocabulary on {len(text):,} characters of text", file=sys.stderr, flush=True)
    tokenizer = train_tokenizer(text, vocabulary)
    return tokenizer, torch.tensor(tokenizer.encode(text).ids)


def train_tokenizer(text: str, vocabulary: int) -> Any:
    """A byte-level BPE of that many tokens, or fewer where the text holds fewer pairs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocabulary < len(alphabet):
        raise UsageError(
            f"--vocabulary must be at least {len(alphabet)}, a token for each byte; given was {vocabulary}"
        )
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer
