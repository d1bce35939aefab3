"""Running the `bastile` command as its users do, on a tiny model that is made on the spot."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from transformers import PreTrainedTokenizerFast

from bastile.cli import data
from bastile.cli.processes import Process
from conftest import tiny_model
from copies import ENVIRONMENT, begin


def one_thread() -> Iterator[None]:
    """For a fixture: in this process too a model this small only waits for a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def command(*arguments: object, status: int = 0, **environment: str) -> str:
    """What it printed; both streams."""
    with tempfile.TemporaryFile("w+") as printed, open(os.devnull) as nothing:
        process = begin(
            "bastile.cli",
            [str(argument) for argument in arguments],
            {**os.environ, **ENVIRONMENT, **environment},
            (nothing, printed, printed),
        )
        code = process.wait(timeout=300)
        printed.seek(0)
        text = printed.read()
    assert code == status, text
    return text


class Copied(Process):
    """A process of a command whose module has been imported already."""

    def _begin(self, command: Sequence[str], environment: Mapping[str, str], log: IO[str]) -> Any:
        read, write = os.pipe()
        told, telling = os.pipe()
        with os.fdopen(read) as given, os.fdopen(telling, "w") as printed:
            begun = begin(command[2], command[3:], {**environment, **ENVIRONMENT}, (given, printed, log))
        begun.stdin, begun.stdout = os.fdopen(write, "w"), os.fdopen(told)
        return begun

    def _exit_code(self) -> int:
        return self._process.wait()


def save_model(folder: Path, text: str, **sizes: int) -> Path:
    """A model and its tokenizer, which has an end-of-text token and no chat template."""
    tokenizer = data.train_tokenizer(text, 300)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.add_special_tokens({"eos_token": "<|end|>"})
    tiny_model(vocab_size=len(wrapped), **sizes).save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return folder
