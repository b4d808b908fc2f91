"""`deepspeed.utils.logging`, `.debug` and their like: the logger that programs write to, memory in a line, spans of functions, names."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

import ds_monitor
from deepspeed._ours.base.raising import refused
from ds_accel import get_accelerator
from ds_comm import world_group

F = TypeVar("F", bound=Callable[..., Any])

log_levels = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


class _Stdout(logging.Handler):
    """Writes to what is standard output at that moment: programs and tests replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), flush=True)
        except ValueError:  # it is closed: the process ends
            self.handleError(record)


class _Steps(logging.Handler):
    """Lets lines that the configuration asks for (`steps_per_print`, `wall_clock_breakdown`) come out where upstream's do."""

    def emit(self, record: logging.LogRecord) -> None:
        already = logging.getLogger().handlers
        for handler in logger.handlers:
            if handler not in already:
                handler.handle(record)


def tell_steps() -> None:
    """Route log lines about steps to this module's logger, whatever its level. Does nothing when called again."""
    steps = logging.getLogger("ds_engine.steps")
    if not any(isinstance(handler, _Steps) for handler in steps.handlers):
        steps.addHandler(_Steps())
        steps.setLevel(logging.INFO)


class LoggerFactory:
    """Makes loggers as upstream's does: level WARNING, one handler to stdout, no propagation."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """Return the logger `name`, with a handler added if the logger has none.

        Raises:
            ValueError: no name.
        """
        if name is None:
            raise refused("logger-name")
        log = logging.getLogger(name)
        if not log.handlers:
            handler = _Stdout()
            handler.setFormatter(
                logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s")
            )
            log.addHandler(handler)
            log.setLevel(level)
            log.propagate = False
        return log


logger = LoggerFactory.create_logger("DeepSpeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks; -1, or an empty list, is all of them."""
    rank = world_group().rank
    if not ranks or rank in ranks or -1 in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print on these ranks, whatever the level of the logger is; -1, or an empty list, is all of them."""
    rank = world_group().rank
    if not ranks or rank in ranks or -1 in ranks:
        print(f"[Rank {rank}] {message}", flush=True)


@functools.cache
def warning_once(message: str) -> None:
    """Warn, once per message."""
    logger.warning(message)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of a logger by its name; of this package's by default.

    Raises:
        ValueError: it is none.
    """
    level = log_levels.get(log_level_str.lower())
    if level is None:
        raise refused("logger-level", log_level_str, ", ".join(log_levels))
    (custom_logger or logger).setLevel(level)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log what device and host hold, on rank 0; only with `force`, as upstream."""
    if force and world_group().rank == 0:
        stats, gib = get_accelerator().memory(), 2**30
        logger.info(
            "%s: %.2f GiB allocated (peak %.2f), %.2f reserved (peak %.2f), %.2f free of %.2f",
            message, stats.allocated / gib, stats.peak / gib, stats.reserved / gib, stats.peak_reserved / gib,
            stats.free / gib, stats.total / gib,
        )  # fmt: skip


_last_told = {"allocated": 0, "reserved": 0}  # bytes, at the last line of `memory_status`


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Log what the device holds, and how much more that is than at the last call.

    Args:
        print_rank: The rank that logs; -1 is every rank.
        reset_max: Start the peaks anew before they are read.
    """
    rank, gib = world_group().rank, 2**30
    if print_rank not in (-1, rank):
        return
    accelerator = get_accelerator()
    accelerator.synchronize()
    if reset_max:
        accelerator.reset_peak_memory()
    stats = accelerator.memory()
    more = {"allocated": stats.allocated - _last_told["allocated"], "reserved": stats.reserved - _last_told["reserved"]}
    _last_told.update(allocated=stats.allocated, reserved=stats.reserved)
    logger.info(
        "%s: rank %d, %.4f GiB allocated (%+.4f, peak %.4f), %.4f reserved (%+.4f, peak %.4f)",
        msg, rank, stats.allocated / gib, more["allocated"] / gib, stats.peak / gib,
        stats.reserved / gib, more["reserved"] / gib, stats.peak_reserved / gib,
    )  # fmt: skip


def instrument_w_nvtx(func: F) -> F:
    """Report a function's calls as spans of ds-monitor, which its sinks show."""

    @functools.wraps(func)
    def call(*args: Any, **options: Any) -> Any:
        with ds_monitor.span(func.__qualname__):
            return func(*args, **options)

    return call  # type: ignore[return-value]


_modules: dict[int, str] = {}
_params: dict[int, str] = {}


def debug_clear_module_and_param_names() -> None:
    """Forget all names."""
    _modules.clear()
    _params.clear()


def debug_extract_module_and_param_names(model: nn.Module) -> None:
    """Register the names of a model's modules and parameters."""
    _modules.update({id(module): name for name, module in model.named_modules()})
    _params.update({id(param): name for name, param in model.named_parameters()})


def debug_module2name(module: nn.Module) -> str:
    """Return the registered name of a module, or `unknown`."""
    return _modules.get(id(module), "unknown")


def debug_module2name_class(module: nn.Module) -> str:
    return f"name={debug_module2name(module)} {type(module).__name__}"


def debug_param2name(param: Tensor) -> str:
    """Return the registered name of a parameter, or `unknown`."""
    return _params.get(id(param), "unknown")


def debug_param2name_id(param: Tensor) -> str:
    return f"name={debug_param2name(param)} id={getattr(param, 'ds_id', None)}"


def debug_param2name_id_shape(param: Tensor) -> str:
    return f"{debug_param2name_id(param)} shape={tuple(getattr(param, 'ds_shape', param.shape))}"


def print_rank_0(message: object, debug: bool = False, force: bool = False) -> None:
    """Print on rank 0; only if `debug` or `force`."""
    if (debug or force) and world_group().rank == 0:
        print(message)


def print_rank(*msg: object, force: bool = False) -> None:
    """Print on every rank, with its number; only if `force`."""
    if force:
        print(f"[rank {dist.get_rank() if dist.is_initialized() else 0}]", *msg, flush=True)


def print_rank0(*msg: object, force: bool = False) -> None:
    """Print on rank 0; only if `force`."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print_rank(*msg, force=force)
