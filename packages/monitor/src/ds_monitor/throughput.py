"""How fast training is: samples, tokens and floating-point operations per second, and the part of the peak that is.

Words: *FLOPs* are floating-point operations (a multiply-add is two); MFU (model FLOPs utilisation, Chowdhery et al. 2022,
appendix B) counts only the operations the model needs, so recomputed activations lower it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ds_monitor.stats import trimmed_mean

__all__ = ["Rates", "StepWork", "ThroughputMeter", "transformer_flops_per_token"]


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step did, over all ranks or on one rank: the same for `peak_flops_per_s`."""

    samples: int
    tokens: int = 0
    flops: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Speed over the meter's window of steps."""

    steps: int
    step_s: float  # trimmed mean of the steps' seconds
    samples_per_s: float
    tokens_per_s: float
    flops_per_s: float
    mfu: float | None  # 0..1; None when no peak was given
    last_samples_per_s: float = 0.0  # of the last step alone
    last_step_s: float = 0.0


class ThroughputMeter:
    """Call `step(work)` at the end of every step.

    Args:
        peak_flops_per_s: what the devices could do at best, of the same ranks that `StepWork` counts; None: no MFU.
        warmup_steps: steps at the start that are not counted (compilation, caches).
        window: how many of the last steps the rates speak of.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        peak_flops_per_s: float | None = None,
        warmup_steps: int = 2,
        window: int = 100,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if peak_flops_per_s is not None and not peak_flops_per_s > 0:
            raise ValueError(f"peak_flops_per_s is {peak_flops_per_s}; it must be above 0, or None")
        self._peak, self._clock = peak_flops_per_s, clock
        self._skip = warmup_steps
        self._window = window
        self._seconds: deque[float] = deque()
        self._works: deque[StepWork] = deque()
        self._total_s, self._samples, self._tokens, self._flops = 0.0, 0, 0, 0.0  # over the window
        self._last_s = clock()

    def step(self, work: StepWork) -> None:
        """Count a step that ends now and did `work`; the step began when the previous step ended."""
        now_s = self._clock()
        took_s, self._last_s = now_s - self._last_s, now_s
        if self._skip > 0:
            self._skip -= 1
            return
        self._count(took_s, work, 1)
        self._seconds.append(took_s)
        self._works.append(work)
        if len(self._works) > self._window:
            self._count(self._seconds.popleft(), self._works.popleft(), -1)

    def _count(self, took_s: float, work: StepWork, sign: int) -> None:
        # Running totals: to sum a hundred steps at each step would be most of what reporting costs.
        self._total_s += sign * took_s
        self._samples += sign * work.samples
        self._tokens += sign * work.tokens
        self._flops += sign * work.flops

    def pause(self) -> None:
        """Forget the time since the last step: call after evaluation or a checkpoint, which are not training."""
        self._last_s = self._clock()

    def rates(self) -> Rates | None:
        """Compute the rates over the window; None before the first counted step."""
        if not self._works:
            return None
        total_s, last_s = max(self._total_s, 1e-12), self._seconds[-1]
        flops_per_s = self._flops / total_s
        return Rates(
            steps=len(self._works),
            step_s=trimmed_mean(self._seconds),
            samples_per_s=self._samples / total_s,
            tokens_per_s=self._tokens / total_s,
            flops_per_s=flops_per_s,
            mfu=None if self._peak is None else flops_per_s / self._peak,
            last_samples_per_s=self._works[-1].samples / max(last_s, 1e-12),
            last_step_s=last_s,
        )


def transformer_flops_per_token(num_params: int, *, num_layers: int, hidden: int, sequence: int) -> float:
    """Compute the training FLOPs per token of a decoder.

    6 per parameter, and 12 * layers * hidden * sequence for attention. `num_params` excludes embeddings that are only
    looked up. `hidden` is heads x head size. Attention is counted in full, not halved for the causal mask, as the
    literature does. Chowdhery et al. 2022, appendix B.
    """
    return 6.0 * num_params + 12.0 * num_layers * hidden * sequence
