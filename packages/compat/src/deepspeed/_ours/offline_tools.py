"""`deepspeed.utils` and `deepspeed.runtime.utils`: logging, contexts and small helpers that scripts use."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import ds_monitor
from deepspeed._ours._torch import tree_map
from deepspeed._ours.runtime_utils import total_norm
from ds_accel import get_accelerator
from ds_comm import world_group
from ds_config.errors import ConfigError
from ds_pipe.partition import balanced, uniform

__all__ = [
    "LoggerFactory", "OnDevice", "RepeatingLoader", "call_to_str", "clip_grad_norm_", "empty_cache",
    "get_z3_leaf_modules", "instrument_w_nvtx", "log_dist",
    "log_levels", "logger", "move_to_device", "noop_decorator",
    "partition_balanced", "partition_uniform", "see_memory_usage", "set_log_level_from_string",
    "set_random_seed", "set_z3_leaf_module", "set_z3_leaf_modules", "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix", "tell_steps", "unset_z3_leaf_modules", "warning_once", "z3_leaf_module",
    "z3_leaf_parameter",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])

# ---- logging

log_levels = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


class _Stdout(logging.Handler):
    """Writes to what is standard output at that moment: programs and tests replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), flush=True)
        except ValueError:  # it is closed: the process ends
            self.handleError(record)


class _Steps(logging.Handler):
    """Lets lines that the configuration asks for (`steps_per_print`, `wall_clock_breakdown`) come out where upstream's do."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.addFilter(lambda record: record.getMessage().startswith("[Rank "))

    def emit(self, record: logging.LogRecord) -> None:
        already = logging.getLogger().handlers
        for handler in logger.handlers:
            if handler not in already:
                handler.handle(record)


def tell_steps() -> None:
    """Route log lines about steps to this module's logger, whatever its level. Does nothing when called again."""
    ours = logging.getLogger("ds_engine")
    if not any(isinstance(handler, _Steps) for handler in ours.handlers):
        ours.addHandler(_Steps())
        ours.setLevel(min(ours.level or logging.INFO, logging.INFO))


class LoggerFactory:
    """Makes loggers as upstream's does: level WARNING, one handler to stdout, no propagation."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """Return the logger `name`, with a handler added if the logger has none.

        Raises:
            ValueError: no name.
        """
        if name is None:
            raise ConfigError("create_logger() was called without a name", code="compat-argument", fix="Pass name=.")
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
        raise ConfigError(
            f"{log_level_str!r} is not a log level", code="compat-argument", fix=f"Use one of {', '.join(log_levels)}."
        )
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


def instrument_w_nvtx(func: F) -> F:
    """Report a function's calls as spans of ds-monitor, which its sinks show."""

    @functools.wraps(func)
    def call(*args: Any, **options: Any) -> Any:
        with ds_monitor.span(func.__qualname__):
            return func(*args, **options)

    return call  # type: ignore[return-value]


# ---- data, devices


class RepeatingLoader:
    """Begins its loader again whenever it ends; an iterator without end."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class OnDevice:
    """Modules made inside are on `device`, with floating-point parameters of `dtype`. Torch's own settings do it.

    Args:
        device: Also `"meta"`, which allocates nothing.
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, torch.device(device), enabled

    def __enter__(self) -> None:
        if self.enabled:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self.device.__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self.enabled:
            self.device.__exit__(*raised)
            torch.set_default_dtype(self._before)


def move_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Move tensors of nested lists, tuples and dicts to `device`.

    Other values, and tensors that `criterion_func` refuses, are returned unchanged.
    """
    return tree_map(
        lambda v: v.to(device) if isinstance(v, Tensor) and (not criterion_func or criterion_func(v)) else v, item
    )


def set_random_seed(seed: int) -> None:
    """Seed Python and torch. NumPy is the caller's."""
    random.seed(seed)
    get_accelerator().manual_seed(seed)


def empty_cache() -> None:
    """Give unused device memory back."""
    get_accelerator().empty_cache()


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None) -> Tensor:
    """torch's, over whole gradients, with squares summed in fp64; the engine clips by `gradient_clipping` itself."""
    del mpu
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norm = total_norm([param.grad for param in params if param.grad is not None], norm_type)
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm.float()


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Format a call as the text `base(args, key=value)`."""
    parts = [repr(arg) for arg in args] + [f"{key}={value!r}" for key, value in kwargs.items()]
    return f"{base}({', '.join(parts)})"


def noop_decorator(func: F) -> F:
    """Return the decorated function itself, unchanged."""
    return func


# ---- cutting lists


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return the bounds of `num_parts` parts that differ by at most one item, the larger parts first."""
    return list(uniform(num_items, num_parts))


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return the bounds of `num_parts` parts of consecutive items whose heaviest is as light as possible."""
    return list(balanced(weights, num_parts))


# ---- leaf modules

_LEAF = "_z3_leaf"


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Set whether a module's whole subtree is a single unit at stage 3. A hint: results do not depend on the flag."""
    setattr(model, _LEAF, flag)


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether it was said."""
    return bool(getattr(model, _LEAF, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether a parameter belongs to a leaf module; upstream marks parameters, here modules are."""
    return bool(getattr(model, "ds_z3_leaf_module", False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """List all leaf modules of a model."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Make all modules of these classes (or class names) leaves.

    Raises:
        ValueError: there is none ("compat-leaf").
    """
    wanted = list(leaf_module_classes)

    def fits(name: str, module: nn.Module) -> bool:
        del name
        kind = type(module)
        names = {kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}"}
        return any(isinstance(module, cls) if isinstance(cls, type) else cls in names for cls in wanted)

    return _flag(model, fits, f"classes {wanted}", raise_if_not_found, True)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Clear the leaf mark of modules of these classes, and return the modules."""
    wanted = tuple(leaf_module_classes)
    return _flag(model, lambda name, module: isinstance(module, wanted), f"classes {wanted}", raise_if_not_found, False)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make the modules of these qualified names leaves; those, and the names that no module has."""
    names = list(module_names)
    return _flag_by_text(model, names, "names", raise_if_not_found, str.__eq__)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make the modules whose qualified name ends so leaves; those, and the ends that no name has."""
    ends = list(module_name_suffixes)
    return _flag_by_text(model, ends, "suffixes", raise_if_not_found, str.endswith)


def _flag_by_text(
    model: nn.Module, texts: list[str], what: str, required: bool, fits: Callable[[str, str], bool]
) -> tuple[list[nn.Module], list[str]]:
    names = [name for name, _ in model.named_modules()]
    missing = [text for text in texts if not any(fits(name, text) for name in names)]
    flagged = _flag(
        model,
        lambda name, module: any(fits(name, text) for text in texts),
        f"{what} {texts}",
        required and bool(texts),
        True,
    )
    return flagged, missing


def mark_leaf_modules(model: nn.Module, section: Any) -> None:
    """Mark the leaf modules of `zero_optimization.leaf_module`.

    A name that matches nothing is no error, since the defaults name many models.
    """
    set_z3_leaf_modules(model, section.classes, raise_if_not_found=False)
    set_z3_leaf_modules_by_name(model, section.names, raise_if_not_found=False)
    set_z3_leaf_modules_by_suffix(model, section.name_suffixes, raise_if_not_found=False)


def _flag(
    model: nn.Module, fits: Callable[[str, nn.Module], bool], what: str, required: bool, flag: bool
) -> list[nn.Module]:
    matches = [module for name, module in model.named_modules() if fits(name, module)]
    if required and not matches:
        raise ConfigError(
            f"{type(model).__name__} has no modules of {what}",
            code="compat-leaf",
            fix="Check with model.named_modules().",
        )
    for module in matches:
        set_z3_leaf_module(module, flag)
    return matches
