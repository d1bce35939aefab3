"""What the pages say: figures are their files', links lead somewhere, the README's code runs."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import bastile
from bastile.ops.fused_linear_cross_entropy import DEFAULT_LOGITS_BYTES
from conftest import tiny_model

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import measured_tables  # noqa: E402  (it is a program of tools/, not of a package)

PAGES = sorted({*measured_tables.pages(), *ROOT.glob("*.md")})
#: A number as measurements have it: with a unit, or as a ratio.
MEASURED = re.compile(r"\d[\d.,]*(?:e-\d+)? ?(?:ms|us|s a step|[KMGT]i?B(?:/s)?|tokens/s|TFLOP/s|x\b|times\b|%)")
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("page", measured_tables.pages(), ids=lambda page: page.name)
def test_measured_figures_are_those_of_their_files(page: Path) -> None:
    assert page.read_text() == measured_tables.written(page), "run: python tools/measured_tables.py"


def test_a_figure_that_someone_changed_is_noticed(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    figure = re.search(r"\*\*(\d+) \(", text)
    assert figure
    changed = tmp_path / "README.md"
    changed.write_text(text.replace(figure[0], f"**{int(figure[1]) - 1} ("))
    assert changed.read_text() != text
    assert figure[0] in measured_tables.written(changed)


def test_the_readme_has_no_figure_of_unknown_origin() -> None:
    """Beside those that are written from files: the fused loss's budget, which is asked of the code, and the size of
    PyTorch with CUDA, which is PyPI's."""
    by_hand = measured_tables.BLOCK.sub("", (ROOT / "README.md").read_text())
    assert set(MEASURED.findall(by_hand)) == {f"{DEFAULT_LOGITS_BYTES >> 20} MiB", "5 GB"}


def test_whose_hidden_states_are_nearest_to_float32() -> None:
    """bench/RESULTS.md says so in words."""
    assert "Bastile's are the nearest to\nfloat32" in (ROOT / "bench/RESULTS.md").read_text()
    [file] = (ROOT / "bench/results").glob("*-loss-differences.json")
    for model, found in json.loads(file.read_text())["models"].items():
        assert min(found, key=lambda name: found[name]["hidden"]) == "Bastile", model


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            heads = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}, link


def test_the_readme_s_run_with_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands, but for the model, which is a tiny one on disk."""
    [script] = [snippet for snippet in SNIPPETS if "Trainer(" in snippet]
    words = sorted(set(re.findall(r"\w+|[^\w\s]", (ROOT / "README.md").read_text())))
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>").save_pretrained(tmp_path)
    tiny_model("qwen3", vocab_size=len(vocabulary), max_position_embeddings=1024).save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("\n\n".join(["One example.", "Another one, somewhat longer.", "A third."]))
    monkeypatch.chdir(tmp_path)
    name = re.search(r'^name = "(.*)"$', script, re.MULTILINE)
    assert name
    found: dict[str, object] = {}
    exec(compile(script.replace(name[1], str(tmp_path)), "README.md", "exec"), found)
    assert bastile.get_patched_ops(found["model"])
    assert torch.isfinite(next(found["model"].parameters())).all()


def test_the_readme_s_other_snippets() -> None:
    """In their order, with what their names stand for."""
    model = tiny_model("llama")
    x, weight = torch.randn(4, 32), torch.ones(32)
    names = {
        "bastile": bastile,
        "model": model,
        "x": x,
        "weight": weight,
        "hidden": x,
        "head": model.lm_head,
        "target": torch.randint(0, 101, (4,)),
    }
    others = [snippet for snippet in SNIPPETS if "Trainer(" not in snippet]
    assert len(others) >= 2
    for snippet in others:
        exec(compile(snippet, "README.md", "exec"), names)
    assert torch.isfinite(names["loss"])
