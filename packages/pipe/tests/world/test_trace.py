"""A measured step is the program that was run, and is drawn beside what it would take on paper."""

import argparse
import contextlib
import io
import itertools
import json

import pytest
import torch.distributed as dist

import ds_pipe
from ds_config.errors import PlanError
from ds_pipe import cli
from ds_testing import world


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@world(2)
def test_two_steps_are_two_traces(bench, schedule, tmp_path):
    step = ds_pipe.pipeline(bench.cut("plain", schedule=schedule), 4)
    with ds_pipe.tracing(step) as traces:
        step(bench.batches(4))
        step(bench.batches(4))
    step(bench.batches(4))  # is not in them
    assert step.executor.timeline is None
    assert len(traces) == 2
    for trace in traces:
        planned = [[a for a in row if a.op.computes] for row in step.program().ranks]
        assert [[str(a).rstrip("*") for a in row] for row in planned] == [
            [str(a).rstrip("*") for a in row] for row in trace.program.ranks
        ]
        assert 0 <= trace.bubble < 1
        for row in trace.ranks:
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(row))
        assert trace.planned().span <= 2 * len(trace.ranks) * trace.span
    traces[1].save(file := tmp_path / f"{dist.get_rank()}.json")
    assert ds_pipe.Trace.load(file) == traces[1]
    step.close()
    cli.register(parser := argparse.ArgumentParser())
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert cli.main(parser.parse_args(["trace", str(file)])) == 0
    assert "measured" in printed.getvalue()
    assert "on paper" in printed.getvalue()
    virtual = trace.program.stages // 2

    def show(*words):
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            status = cli.main(
                parser.parse_args(["show", "schedule", "--microbatches", "6", "--trace", str(file), *words])
            )
        return status, out.getvalue()

    status, text = show("--name", "listed", "--stages", "2")  # from what was measured, where it was measured
    assert status == 0
    assert f"listed: 2 ranks, {2 * virtual} stages, 6 microbatches, verified" in text
    status, text = show("--name", "zbv" if virtual == 1 else "1f1b", "--stages", "2")
    assert status == 1
    assert "pipe-trace" in text
    assert show("--name", "listed", "--stages", "3")[0] == 1


def test_other_files_are_refused(tmp_path):
    for text in ("no", json.dumps({"format": "x"}), json.dumps([])):
        (tmp_path / "t.json").write_text(text)
        with pytest.raises(PlanError) as caught:
            ds_pipe.Trace.load(tmp_path / "t.json")
        assert caught.value.code == "pipe-trace"
