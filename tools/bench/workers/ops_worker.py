"""One side of `nox -s bench -- ops`, in its own process: reads a case name a line, answers with seconds a call.

Runs in our environment and in the peer's, so it imports each library only for its own cases. The arguments are the
number of threads and the names of the cases to prepare.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from answering import answering, serve

N = 34_000_000
REPEAT = 3  # calls timed together: a burst short enough to fit between other users of the machine

Case = Callable[[], object]


def shapes() -> list[int]:
    """88 tensors of a small GPT's sizes that sum to about N."""
    hidden = 597
    block = [hidden * hidden * 4, hidden, hidden * hidden * 4, hidden, hidden * hidden, hidden, hidden, 3 * hidden]
    return block * 11


def grads_of(params: list[torch.nn.Parameter]) -> None:
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3


def torch_case(sizes: list[int], **options: bool) -> Case:
    params = [torch.nn.Parameter(torch.randn(n)) for n in sizes]
    grads_of(params)
    return torch.optim.AdamW(params, **options).step


def deepspeed_adam(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, lr=1e-3, weight_decay=1e-2)


def deepspeed_case(sizes: list[int]) -> Case:
    params = [torch.nn.Parameter(torch.randn(n)) for n in sizes]
    grads_of(params)
    return deepspeed_adam(params).step


def ours_case(sizes: list[int], *, arena: bool) -> Case:
    from ds_ops.host_arena import zeros_huge
    from ds_ops.optim import AdamW

    if arena:
        data, grads = (zeros_huge(sizes, torch.float32, stream=s) for s in (0, 3))
        params = [torch.nn.Parameter(t.normal_()) for t in data]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.normal_().mul_(1e-3)
    else:
        params = [torch.nn.Parameter(torch.randn(n)) for n in sizes]
        grads_of(params)
    return AdamW(params).step


def ours_fused() -> Case:
    """bf16 gradients in, bf16 parameters out: norm, then unscale + clip + step + cast + zero in one pass."""
    from ds_ops import grad_norm
    from ds_ops.host_arena import zeros_huge
    from ds_ops.optim import AdamW, FusedOps

    (master,), (grad,), (low,) = (zeros_huge([N], d, stream=s) for d, s in
                                  ((torch.float32, 0), (torch.bfloat16, 3), (torch.bfloat16, 4)))  # fmt: skip
    p = torch.nn.Parameter(master.normal_())
    optimizer = AdamW([p])

    def step() -> None:
        norm = grad_norm([grad]) / 1024
        scale = min(1.0, 1.0 / (norm + 1e-6)) / 1024
        optimizer.step(fusion=FusedOps(scale, True, {p: grad}, {p: low}))

    return step


def sequence(make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]) -> Case:
    """The same work as separate passes, in the order a ZeRO-Offload step makes them."""
    p = torch.nn.Parameter(torch.randn(N))
    grad, low = torch.zeros(N, dtype=torch.bfloat16), torch.zeros(N, dtype=torch.bfloat16)
    p.grad = torch.zeros(N)
    optimizer = make([p])

    def step() -> None:
        wide = p.grad
        if wide is None:
            raise SystemExit("the gradient was dropped")
        wide.copy_(grad)
        norm = float(wide.norm()) / 1024
        wide.mul_(min(1.0, 1.0 / (norm + 1e-6)) / 1024)
        optimizer.step()
        low.copy_(p.detach())
        grad.zero_()

    return step


def triad(streaming: bool) -> Case:
    from ds_ops import _call
    from ds_ops.host_arena import zeros_huge

    a, b, c = (zeros_huge([N], torch.float32, stream=s)[0].fill_(1.0) for s in range(3))
    run, where = _call.native().triad, [_call.address(t) for t in (a, b, c)]
    keep = (a, b, c)
    return lambda: (run(*where, N, 0.5, streaming, torch.get_num_threads()), keep)[0]


def one_way(op: str) -> Case:
    """Nothing but reading, or writing, N elements in huge pages."""
    import ds_ops
    from ds_ops.host_arena import zeros_huge

    x = zeros_huge([N], torch.float32)[0].fill_(0.5)
    return (lambda: ds_ops.sum_squares(x)) if op == "read" else (lambda: ds_ops.fill(x, 0.5))


def pass_case(op: str) -> Case:
    """One pass of ours over N elements in huge pages."""
    import ds_ops
    from ds_ops.host_arena import zeros_huge

    (x,), (y,), (low,) = (zeros_huge([N], d, stream=s) for d, s in
                          ((torch.float32, 0), (torch.float32, 1), (torch.bfloat16, 2)))  # fmt: skip
    x.normal_()
    calls: dict[str, Case] = {
        "norm": lambda: ds_ops.sum_squares(x),
        "torch_norm": lambda: float(x.norm()),
        "copy": lambda: ds_ops.convert(y, x),
        "torch_copy": lambda: y.copy_(x),
        "cast": lambda: ds_ops.convert(low, x),
        "torch_cast": lambda: low.copy_(x),
        "fill": lambda: ds_ops.fill(y, 0.5),
        "torch_fill": lambda: y.fill_(0.5),
    }
    return calls[op]


CASES: dict[str, Callable[[], Case]] = {
    "triad": lambda: triad(False),
    "triad_nt": lambda: triad(True),
    "read": lambda: one_way("read"),
    "write": lambda: one_way("write"),
    "flat_ours": lambda: ours_case([N], arena=True),
    "flat_ours_malloc": lambda: ours_case([N], arena=False),
    "flat_torch_fused": lambda: torch_case([N], fused=True),
    "flat_torch_foreach": lambda: torch_case([N], foreach=True),
    "flat_deepspeed": lambda: deepspeed_case([N]),
    "list_ours": lambda: ours_case(shapes(), arena=True),
    "list_ours_malloc": lambda: ours_case(shapes(), arena=False),
    "list_torch_fused": lambda: torch_case(shapes(), fused=True),
    "list_torch_foreach": lambda: torch_case(shapes(), foreach=True),
    "list_deepspeed": lambda: deepspeed_case(shapes()),
    "fused_ours": ours_fused,
    "fused_torch": lambda: sequence(lambda p: torch.optim.AdamW(p, fused=True)),
    "fused_deepspeed": lambda: sequence(deepspeed_adam),
    **{
        f"pass_{op}": (lambda op=op: pass_case(op))
        for op in ("norm", "torch_norm", "copy", "torch_copy", "cast", "torch_cast", "fill", "torch_fill")
    },
}


def main() -> None:
    threads, names = int(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(threads)
    answer = answering()
    cases = {name: CASES[name]() for name in names}
    for call in cases.values():
        call()
    answer("ready")

    def seconds(name: str) -> float:
        call, start = cases[name], time.perf_counter()
        for _ in range(REPEAT):
            call()
        return (time.perf_counter() - start) / REPEAT

    serve(answer, seconds)


if __name__ == "__main__":
    main()
