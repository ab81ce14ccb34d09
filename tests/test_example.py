"""The example's parts, and that its flags do what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_gpt  # noqa: E402
from gpt import GPT, GPTConfig, parameter_count  # noqa: E402
from text import corpus, windows  # noqa: E402

SMALL = GPTConfig(vocab=300, context=16, layers=2, width=32, heads=4)


def batches(*, seed: int = 0, rank: int = 0, count: int = 3) -> list[tuple[torch.Tensor, ...]]:
    return list(islice(windows(corpus(), batch=4, context=16, seed=seed, rank=rank), count))


def same(one: list[tuple[torch.Tensor, ...]], two: list[tuple[torch.Tensor, ...]]) -> bool:
    return all(torch.equal(a[0], b[0]) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("length", [16, 5])
def test_logits_have_one_row_of_vocab_per_token(length: int) -> None:
    logits = GPT(SMALL)(torch.zeros(3, length, dtype=torch.long))
    assert logits.shape == (3, length, SMALL.vocab)


def test_no_token_sees_a_later_one() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL).eval()
    ids = torch.randint(SMALL.vocab, (1, 16))
    changed = ids.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % SMALL.vocab
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_tied_weights_are_one_parameter() -> None:
    tied = GPT(SMALL)
    untied = GPT(GPTConfig(vocab=300, context=16, layers=2, width=32, heads=4, tied=False))
    assert tied.head.weight is tied.tokens.weight
    assert untied.head.weight is not untied.tokens.weight
    assert parameter_count(untied) - parameter_count(tied) == SMALL.vocab * SMALL.width


@pytest.mark.parametrize("sizes", [{"heads": 5}, {"layers": 0}, {"vocab": -1}])
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"heads|at least 1"):
        GPTConfig(**sizes)


def test_corpus_is_bytes_of_text() -> None:
    tokens = corpus()
    assert tokens.dtype == torch.uint8
    assert len(tokens) > 100_000
    assert "statement" in bytes(tokens.tolist()).decode()


def test_target_is_the_next_byte() -> None:
    for x, y in batches():
        assert x.shape == y.shape == (4, 16)
        assert x.dtype == y.dtype == torch.long
        assert torch.equal(x[:, 1:], y[:, :-1])


def test_windows_repeat_by_seed_and_differ_by_rank() -> None:
    assert same(batches(rank=1), batches(rank=1))
    assert not same(batches(rank=0), batches(rank=1))
    assert not same(batches(seed=5), batches(seed=0))


def test_context_longer_than_the_text_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than 10 tokens"):
        next(windows(corpus()[:10], batch=1, context=10, seed=0))


def test_flags_make_a_config() -> None:
    config = train_gpt.parse(["--layers", "3", "--untied", "--vocab", "512", "--steps", "7"])
    assert config.gpt == GPTConfig(layers=3, vocab=512, tied=False)
    assert config.steps == 7
    assert train_gpt.parse([]) == train_gpt.TrainConfig()


@pytest.mark.parametrize("flags", [["--heads", "3"], ["--vocab", "10"], ["--steps", "0"]])
def test_wrong_flags_are_usage_errors(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        train_gpt.parse(flags)
    assert stop.value.code == 2


TINY = ["--layers=1", "--width=32", "--heads=2", "--context=32"]
TINY += ["--batch=4", "--steps=30", "--lr=0.01"]


def test_one_process_needs_no_torchrun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert train_gpt.main([*TINY, "--backend", "eager", "--expect-fall", "1"]) == 0
    assert "1 rank(s)" in capsys.readouterr().out


def torchrun(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(EXAMPLES / "train_gpt.py"), *TINY, *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("fall", "succeeds"), [("1", True), ("100", False)])
def test_expect_fall_decides_the_exit_status(fall: str, succeeds: bool) -> None:
    # the system that needs no compiler where the answer is "no": compiling says nothing about it
    backend = "ddp" if succeeds else "eager"
    run = torchrun("--backend", backend, "--expect-fall", fall)
    assert (run.returncode == 0) == succeeds, run.stderr
    assert "2 rank(s)" in run.stdout
    assert ("expected at least" in run.stdout) != succeeds
