"""Running the `bastile` command as its users do, on a tiny model that is made on the spot."""

import os
import subprocess
import sys
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from bastile.cli import data
from conftest import tiny_model


def command(*arguments: object, status: int = 0, **environment: str) -> str:
    """What it printed; both streams."""
    done = subprocess.run(
        [sys.executable, "-m", "bastile", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
        # A model this small only waits for a second thread; tables are to be as wide as their words.
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "140", **environment},
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def save_model(folder: Path, text: str) -> Path:
    """A model and its tokenizer, which has an end-of-text token and no chat template."""
    tokenizer = data.train_tokenizer(text, 300)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.add_special_tokens({"eos_token": "<|end|>"})
    tiny_model(vocab_size=len(wrapped)).save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return folder
