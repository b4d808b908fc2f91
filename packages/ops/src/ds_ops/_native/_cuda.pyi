"""Signatures of the module built from native/cuda: those of `_cpu` with device and stream in place of threads."""

norm_grad_blocks: int
sum_blocks: int
update_chunk: int

def devices() -> tuple[int, str]: ...
def update(
    rule: int,
    coefficients: tuple[float, ...],
    grad_scale: float,
    zero_grad: bool,
    rows: int,
    count: int,
    chunks: int,
    dtypes: int,
    scale: int,
    ratio: int,
    partials: int,
    device: int,
    stream: int,
) -> int: ...
def sum_squares(x: int, dtype: int, n: int, partials: int, device: int, stream: int) -> int: ...
def convert(
    dst: int, dst_dtype: int, src: int, src_dtype: int, n: int, scale: float, device: int, stream: int
) -> int: ...
def fill(dst: int, dtype: int, n: int, value: float, device: int, stream: int) -> int: ...
def quantize(
    spec: tuple[float, ...], rows: tuple[int, ...], order: int, x: int, dtype: int, device: int, stream: int
) -> int: ...
def dequantize(
    spec: tuple[float, ...],
    rows: tuple[int, ...],
    index: int,
    count: int,
    out: int,
    dtype: int,
    device: int,
    stream: int,
) -> int: ...
def reduce(
    spec: tuple[float, ...],
    rows: tuple[int, ...],
    sources: int,
    factor: float,
    out: int,
    dtype: int,
    device: int,
    stream: int,
) -> int: ...
def reduce_quantized(
    spec: tuple[float, ...],
    rows: tuple[int, ...],
    sources: int,
    factor: float,
    out_spec: tuple[float, ...],
    out_rows: tuple[int, ...],
    device: int,
    stream: int,
) -> int: ...
def norm(eps: float, rows: int, cols: int, dtype: int, addresses: tuple[int, ...], device: int, stream: int) -> int: ...
def norm_grad(rows: int, cols: int, dtype: int, addresses: tuple[int, ...], device: int, stream: int) -> int: ...
