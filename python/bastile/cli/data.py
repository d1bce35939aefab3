"""Text and tokens."""

import sysconfig
from pathlib import Path
from typing import Any

from bastile.cli.errors import UsageError

_LIBRARY_BYTES = 4_000_000  # enough that the demo on a CPU sees no text twice; its BPE trains in seconds
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


def read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
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
