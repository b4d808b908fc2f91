"""How a block's bytes become those in a file, and back. No torch.

    ""      as they are
    zstd    compressed without loss; needs the package `zstandard`
    bf16    float32 rounded to bfloat16 (to nearest, ties to even): half the bytes, relative error at most 2^-8
    int8    float32 in groups of 128 with one float32 scale: 0.26 of the bytes, error at most 1/127 of the group's largest

The last two lose something, and are for the moments of an optimizer. Int8 keeps what is not zero from becoming zero, so that a
second moment never leaves a first one without its divisor. `certificates` has training runs with each.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any, Final

import numpy as np

from ds_config.errors import CheckpointError, UnsupportedError

__all__ = ["CODECS", "GROUP", "LOSSY", "certificates", "decode", "encode", "require"]

CODECS: Final = ("", "zstd", "bf16", "int8")
LOSSY: Final = ("bf16", "int8")
GROUP: Final = 128
_LEVEL: Final = 3  # zstd's own default
_TINY: Final = float(np.finfo(np.float32).tiny)
_MOST: Final = float(np.finfo(np.float32).max)


def certificates() -> dict[str, Any]:
    """Runs with moments that went through each lossy codec, beside the exact run; the tests of this package made them."""
    runs: dict[str, Any] = json.loads(resources.files("ds_ckpt").joinpath("certificates.json").read_text())
    return runs


def require(codec: str) -> None:
    """Raises UnsupportedError "ckpt-zstd" where the package for a codec is missing."""
    if codec == "zstd":
        _zstd()


def encode(codec: str, data: memoryview) -> tuple[bytes | memoryview, bytes | memoryview]:
    """Encode a block with `codec`; return the bytes for the file and the bytes that a reader will decode.

    Raises:
        CheckpointError: "ckpt-codec": a value that int8 cannot hold (infinite, or not a number).
    """
    if codec == "zstd":
        return _zstd().ZstdCompressor(level=_LEVEL).compress(data), data
    if codec == "bf16":
        stored: bytes = _to_bf16(np.frombuffer(data, np.uint32)).tobytes()
        return stored, decode(codec, memoryview(stored), data.nbytes)
    if codec == "int8":
        stored = _to_int8(np.frombuffer(data, np.float32))
        return stored, decode(codec, memoryview(stored), data.nbytes)
    return data, data


def decode(codec: str, data: memoryview, nbytes: int) -> bytes | memoryview:
    """Decode the `nbytes` bytes of a block from the bytes in the file.

    Raises:
        CheckpointError: "ckpt-block-damaged": the bytes in the file do not decode to `nbytes` bytes.
    """
    if codec == "":
        return data
    failures: tuple[type[Exception], ...] = (ValueError, MemoryError, *_zstd_errors())
    try:
        if codec == "zstd":
            zstd = _zstd()
            claimed = zstd.get_frame_parameters(data).content_size
            if claimed != nbytes:  # before anything is allocated for it
                raise ValueError(f"it says that it holds {claimed} bytes, not {nbytes}")
            out: bytes = zstd.ZstdDecompressor().decompress(data)
        elif codec == "bf16":
            out = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).tobytes()
        else:
            out = _from_int8(data, nbytes // 4)
    except failures as error:
        raise _damaged(codec, str(error)) from error
    if len(out) != nbytes:
        raise _damaged(codec, f"{len(out)} bytes came out, not {nbytes}")
    return out


def _damaged(codec: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"a block cannot be decoded as {codec}: {why}",
        code="ckpt-block-damaged",
        fix="Use another checkpoint; `ds ckpt verify` lists all damaged blocks.",
    )


def _to_bf16(bits: np.ndarray) -> np.ndarray:
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    not_a_number = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(not_a_number, (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _to_int8(values: np.ndarray) -> bytes:
    groups = -(-values.size // GROUP)
    padded = np.zeros(groups * GROUP, np.float32)
    padded[: values.size] = values
    rows = padded.reshape(groups, GROUP)
    largest = np.abs(rows).max(axis=1)
    if not np.isfinite(largest).all():
        raise CheckpointError(
            "int8 was asked for, and a value is infinite or not a number",
            code="ckpt-codec",
            fix="See why the optimizer's moments are not finite, or store them as they are.",
        )
    scales = np.maximum(largest / np.float32(127), np.float32(_TINY)).astype(np.float32)
    # 127 of a scale that was rounded up may be more than the largest float.
    scales = np.where(largest > _MOST * 0.999, np.nextafter(scales, np.float32(0)), scales)
    quotients = np.clip(np.rint(rows / scales[:, None]), -127, 127)
    quotients = np.where((quotients == 0) & (rows != 0), np.sign(rows), quotients)
    return scales.tobytes() + quotients.astype(np.int8).reshape(-1)[: values.size].tobytes()


def _from_int8(data: memoryview, numel: int) -> bytes:
    groups = -(-numel // GROUP)
    if data.nbytes != 4 * groups + numel:
        raise ValueError(f"{data.nbytes} bytes for {numel} values")
    scales = np.frombuffer(data[: 4 * groups], np.float32)
    values = np.zeros(groups * GROUP, np.float32)
    values[:numel] = np.frombuffer(data[4 * groups :], np.int8)
    return (values.reshape(groups, GROUP) * scales[:, None]).reshape(-1)[:numel].tobytes()


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise UnsupportedError(
            "zstd needs the package zstandard, which is not installed",
            code="ckpt-zstd",
            fix="pip install 'ds-ckpt[zstd]'",
        ) from error
    return zstandard


def _zstd_errors() -> tuple[type[Exception], ...]:
    try:
        import zstandard
    except ImportError:
        return ()
    return (zstandard.ZstdError,)
