"""`deepspeed.runtime.pipe.schedule`: what a stage does, step by step, in upstream's instructions.

ds-pipe has schedules of its own (`ds_pipe.make_program`), which is what runs. These are for programs that look at a schedule.

With S stages, stage s runs the forward of microbatch m at step 2m + s, and its backward at step 2m + 2S - 1 - s (one forward, one
backward). What was made in one step is sent at the beginning of the next.
"""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Iterator
from typing import Any

from deepspeed._ours.base.forwarding import reads
from deepspeed._ours.monitor.upstream_logging import logger


class PipeInstruction:
    """One thing to do; its arguments are attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name, self.kwargs = type(self).__name__, kwargs
        vars(self).update(kwargs)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.kwargs == getattr(other, "kwargs", None)

    __hash__ = None  # type: ignore[assignment]


class BufferOpInstruction(PipeInstruction):
    """Something done with the values of one buffer."""

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


def _instruction(name: str, base: type[PipeInstruction], meaning: str) -> Any:
    return type(name, (base,), {"__doc__": meaning, "__module__": __name__})


OptimizerStep = _instruction("OptimizerStep", PipeInstruction, "Update.")
ReduceGrads = _instruction("ReduceGrads", PipeInstruction, "Add gradients up over data-parallel ranks.")
ReduceTiedGrads = _instruction("ReduceTiedGrads", PipeInstruction, "Add gradients of tied parameters up over stages.")
LoadMicroBatch = _instruction("LoadMicroBatch", BufferOpInstruction, "Take the next microbatch.")
ForwardPass = _instruction("ForwardPass", BufferOpInstruction, "Run the stage.")
BackwardPass = _instruction("BackwardPass", BufferOpInstruction, "Run its backward.")
SendActivation = _instruction("SendActivation", BufferOpInstruction, "Give the output to the next stage.")
RecvActivation = _instruction("RecvActivation", BufferOpInstruction, "Take the input from the stage before.")
SendGrad = _instruction("SendGrad", BufferOpInstruction, "Give the input's gradient to the stage before.")
RecvGrad = _instruction("RecvGrad", BufferOpInstruction, "Take the output's gradient from the next stage.")


class _OnlyLookedAt(ABCMeta):
    """Warns where a program replaces a method of a schedule: no engine here runs it."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if not name.startswith("_"):
            logger.warning(
                "%s.%s is set from outside: engines run ds-pipe's schedules, so that it has no effect on training",
                cls.__name__, name,
            )  # fmt: skip
        super().__setattr__(name, value)


class PipeSchedule(metaclass=_OnlyLookedAt):
    """The steps of one stage; each is a list of instructions."""

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the list of instructions of each step."""

    def num_pipe_buffers(self) -> int:
        """Return the number of microbatches in flight at once."""
        return self.micro_batches

    stage = reads("stage_id", "This one.")
    num_stages = reads("stages", "Stages in all.")
    num_micro_batches = reads("micro_batches", "Microbatches of a train batch.")

    @property
    def is_first_stage(self) -> bool:
        """Whether it takes the data."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it makes the loss."""
        return self.stage_id == self.stages - 1

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return self.steps()

    def _there(self, micro: int) -> bool:
        return 0 <= micro < self.micro_batches

    def _buffer(self, micro: int) -> int:
        return micro % self.num_pipe_buffers()


class InferenceSchedule(PipeSchedule):
    """Forwards only: microbatch m at step m + s."""

    def num_pipe_buffers(self) -> int:
        """Return 2: a microbatch is computed while another is sent."""
        return 2

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Send what the step before made, take the next, run it."""
        for step in range(self.micro_batches + self.stages - 1):
            micro = step - self.stage_id
            done: list[PipeInstruction] = []
            if self._there(micro - 1) and not self.is_last_stage:
                done.append(SendActivation(self._buffer(micro - 1)))
            if self._there(micro):
                buffer = self._buffer(micro)
                if not self.is_first_stage:
                    done.append(RecvActivation(buffer))
                if self.is_first_stage or self.is_last_stage:
                    done.append(LoadMicroBatch(buffer))
                done.append(ForwardPass(buffer))
            yield done


class TrainSchedule(PipeSchedule):
    """One forward, one backward; the last step reduces and updates."""

    def num_pipe_buffers(self) -> int:
        """Return the number of forwards that wait for their backward, at least two."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step of the 1F1B schedule. See the top of the file."""
        total = 2 * (self.micro_batches + self.stages - 1)
        for step in range(total):
            micro, forward = self._at(step)
            before, _ = self._at(step - 1)
            done = self._exchange(micro, before, forward)
            if self._there(micro):
                buffer = self._buffer(micro)
                if forward and (self.is_first_stage or self.is_last_stage):
                    done.append(LoadMicroBatch(buffer))
                done.append(ForwardPass(buffer) if forward else BackwardPass(buffer))
            if step == total - 1:
                done += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield done

    def _at(self, step: int) -> tuple[int, bool]:
        """Return the microbatch of a step, and whether the step is its forward.

        A microbatch outside of 0..M - 1 means that the stage idles.
        """
        forward = step % 2 == self.stage_id % 2
        first = self.stage_id if forward else 2 * self.stages - 1 - self.stage_id
        return (step - first) // 2, forward

    def _exchange(self, micro: int, before: int, forward: bool) -> list[PipeInstruction]:
        done: list[PipeInstruction] = []
        neighbour = not self.is_first_stage if forward else not self.is_last_stage
        if neighbour and self._there(before):
            done.append((SendGrad if forward else SendActivation)(self._buffer(before)))
        if neighbour and self._there(micro):
            done.append((RecvActivation if forward else RecvGrad)(self._buffer(micro)))
        return done
