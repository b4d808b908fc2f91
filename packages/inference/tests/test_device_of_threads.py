"""A step works on the device of its weights, whichever thread calls."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ds_inference import LLMEngine, SamplingParams, flights, load
from ds_inference.hf_runner import HFModelRunner
from ds_inference.paged_attention import make_batch
from ds_inference.requests import ScheduledChunk
from ds_testing.current_device import follow_current_device


@pytest.mark.parametrize("foreign", [False, True])
def test_a_step_computes_and_chooses_on_the_device_of_the_weights(
    foreign: bool, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's thread begins with device 0, and so does a program that asked for another one: kernels of Triton went there."""
    current, seen = follow_current_device(monkeypatch), list[tuple[str, bool]]()
    engine = load(tiny("llama"), native=False)
    if foreign:
        engine = LLMEngine(HFModelRunner(tiny("llama")), blocks=64)
    decoder = engine.decoder

    def watched(what: str, plain: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            seen.append((what, current() == decoder.device))
            return plain(*args, **keywords)

        return call

    monkeypatch.setattr(flights, "sample_rows", watched("choose", flights.sample_rows))
    if foreign:
        monkeypatch.setattr(decoder, "_run", watched("compute", decoder._run))
    else:
        monkeypatch.setattr(decoder, "_layer", watched("compute", decoder._layer))
    thread = threading.Thread(target=engine.generate, args=([[1, 2, 3]], SamplingParams(2)))
    thread.start()
    thread.join()
    assert {what for what, _ in seen} == {"choose", "compute"}
    assert all(inside for _, inside in seen)
    seen.clear()
    batch, _ = make_batch([ScheduledChunk(0, (1, 2), 0, (0,), 1)], engine.cache.size, decoder.device)
    decoder.forward(batch, engine.cache)  # as a follower of several ranks calls it
    assert seen
    assert all(inside for _, inside in seen)
