"""The nearest name: exact on hand-picked cases, and a distance that is a distance."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typos import single_edits

from ds_config.did_you_mean import distance, nearest

KEYS = [
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_optimization",
    "offload_param",
    "offload_optimizer",
    "reduce_bucket_size",
    "allgather_bucket_size",
    "prefetch_bucket_size",
    "fp16",
    "bf16",
    "stage",
    "lr",
]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("gradient_clipp1ng", "gradient_clipping"),
        ("trainBatchSize", "train_batch_size"),
        ("train-batch-size", "train_batch_size"),
        ("TRAIN_BATCH_SIZE", "train_batch_size"),
        ("trainbatchsize", "train_batch_size"),
        ("micro_batch_size", "train_micro_batch_size_per_gpu"),
        ("offload_params", "offload_param"),
        ("offlaod_optimiser", "offload_optimizer"),
        ("stages", "stage"),
        ("fp6", "fp16"),
        ("gradient_accumulation", "gradient_accumulation_steps"),
        ("rl", "lr"),
    ],
)
def test_what_people_write(wrong: str, right: str) -> None:
    assert nearest(wrong, KEYS) == [right]


def test_nothing_is_suggested_for_what_is_like_nothing() -> None:
    for stranger in ("wandb", "tokenizer", "x", "", "compression_training"):
        assert nearest(stranger, KEYS) == []


def test_several_are_ranked_and_the_name_itself_is_no_suggestion() -> None:
    assert nearest("reduce_bucket_siz", KEYS, count=3)[0] == "reduce_bucket_size"
    assert nearest("stage", KEYS) == []
    assert nearest("bp16", KEYS, count=2) == ["bf16", "fp16"]


def test_single_edits_of_every_key_find_it() -> None:
    total = right = 0
    for key in KEYS:
        for wrong, _ in list(single_edits(key))[::7]:
            if wrong not in KEYS:
                total += 1
                right += nearest(wrong, KEYS) == [key]
    assert right / total > 0.99, (right, total)


WORDS = st.text(st.sampled_from("ab_c"), max_size=7)


@given(WORDS, WORDS, st.integers(0, 8))
@settings(max_examples=300, deadline=None)
def test_distance_is_symmetric_bounded_and_zero_only_for_equals(a: str, b: str, limit: int) -> None:
    exact = distance(a, b)
    assert exact == distance(b, a)
    assert (exact == 0) == (a == b)
    assert abs(len(a) - len(b)) <= exact <= max(len(a), len(b))
    assert distance(a, b, limit) == min(exact, limit + 1)


def test_single_edits_cost_one() -> None:
    for wrong, edit in single_edits("prefetch_bucket"):
        if edit != "case":
            assert distance(wrong, "prefetch_bucket") == 1, (wrong, edit)
    kinds = {edit for _, edit in single_edits("a_bc")}
    assert kinds == {"insert", "delete", "replace", "swap", "underscore", "case"}
