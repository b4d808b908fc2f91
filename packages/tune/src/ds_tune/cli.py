"""`ds tune`: find the configuration that fits and is fastest, in a few short trials of the user's own script."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_tune.rehearsed_trial import RehearsedWorld
    from ds_tune.request import TuningRequest
    from ds_tune.search import NextTrial, Result
    from ds_tune.trial_runner import TrialRunner
    from ds_tune.tuning import Tuning, TuningResult

__all__ = ["HELP", "devices_here", "main", "register", "show", "teller"]

HELP = "find the configuration that fits and is fastest, in short trials of your script"
_FLAG = "--deepspeed_config"


def register(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments. All after the script's name belongs to the script."""
    parser.allow_abbrev = False
    add = parser.add_argument
    add("--config", metavar="FILE", help="JSON or HJSON; default: what the script's own arguments name")
    add(
        "--config-option",
        default=_FLAG,
        metavar="FLAG",
        help=f"the script's option for it ({_FLAG}); empty: it has none",
    )
    add("--nproc", type=int, default=0, metavar="N", help="ranks (default: one per visible device, or 1)")
    add("--launch", default="", metavar="WORDS", help="more options for `ds run`, in quotes")
    add(
        "--world-size",
        dest="world",
        type=int,
        default=0,
        metavar="N",
        help="ranks in all, where --launch starts several hosts",
    )
    add(
        "--links",
        default="",
        metavar="LINKS",
        help="rehearse the trials over these links, in a world of --world-size ranks that is not there",
    )
    add("--nodes", type=int, default=0, metavar="N", help="nodes of that world (default: by the links' node size)")
    add("--model", metavar="MODEL", help="the model as `ds plan` takes it; otherwise the first trial tells")
    add(
        "--search",
        action="append",
        default=[],
        dest="tries",
        metavar="KEY=V,V",
        help="look at these values; env.NAME is a variable",
    )
    add("--fix", dest="keep", action="append", default=[], metavar="KEY", help="leave this key as it is")
    add("--micro", default="1:1024", metavar="LOW:HIGH", help="sizes of a microbatch (1:1024)")
    add("--memory", metavar="SIZE", help="most memory of one rank, as 8GiB")
    add(
        "--metric",
        choices=("throughput", "latency", "flops"),
        default="throughput",
        help="what the best configuration is best in",
    )
    add("--trials", type=int, default=12, metavar="N", help="trials at most (12)")
    add("--steps", type=int, default=3, metavar="N", help="steps that a first trial measures (3)")
    add("--warmup", type=int, default=2, metavar="N", help="steps before them (2)")
    add("--time-limit", type=float, default=600.0, metavar="S", help="seconds of one trial (600)")
    add("--results", default="autotuning_results", metavar="DIR", help="where all of it is kept (autotuning_results)")
    add("--exps", default="autotuning_exps", metavar="DIR", help="what was tried, a file each (autotuning_exps)")
    add("--overwrite", action="store_true", help="forget what is there; otherwise go on from it")
    add("--explain", action="store_true", help="start nothing: tell what is known")
    add("--name", default="", metavar="NAME", help="with --explain: of this candidate alone")
    add("--json", action="store_true", help="print JSON instead of text")
    add("script", metavar="SCRIPT", help="what every rank runs")
    add("script_args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def main(args: argparse.Namespace) -> int:
    """Tune, or explain what is known."""
    from ds_config.config_file import read
    from ds_engine.models import shapes_from
    from ds_tune.request import asked_of, parse_setting
    from ds_tune.search import TrialBudget
    from ds_tune.tuning import Tuning

    words, file = _config_words(args)
    config = dict(read(file).data)
    request = asked_of(config)
    tries = dict(parse_setting(text) for text in args.tries)
    request = replace(
        request,
        values={**request.values, **tries},
        fixed=frozenset(args.keep),
        limits=replace(request.limits, memory_bytes=_bytes_of(args.memory), micro=_range_of(args.micro)),
        budget=TrialBudget(_positive("--trials", args.trials), _positive("--steps", args.steps)),
        metric=args.metric,
    )
    launch = (*(["--nproc", str(args.nproc)] if args.nproc else []), *shlex.split(args.launch))
    job = _job(args, (request.config, words, launch))
    if args.links:
        job = replace(job, rehearsed=_rehearsed(args, launch))
    world = args.world or args.nproc or devices_here()
    tuning = Tuning(request, job, world, on_trial=teller(), shapes=shapes_from(args.model) if args.model else None)
    if args.explain:
        return _explain(tuning, args.name, args.json, job)
    return _tune(tuning, request, (args.overwrite, args.json))


def _tune(tuning: Tuning, request: TuningRequest, how: tuple[bool, bool]) -> int:
    overwrite, as_json = how
    if overwrite:
        tuning.forget()
    elif (trial_count := tuning.resume()) and not as_json:
        print(
            f"going on from {trial_count} trial{'s' * (trial_count != 1)} on disk (--overwrite forgets them)",
            flush=True,
        )
    try:
        outcome = tuning.run()
    except KeyboardInterrupt:
        print("\ninterrupted; the trials that ended are kept, and the same command goes on from there", file=sys.stderr)
        return 130
    files = tuning.write(outcome)
    show(outcome, files, request, as_json)
    return 0


def _rehearsed(args: argparse.Namespace, launch: tuple[str, ...]) -> RehearsedWorld:
    from ds_config.errors import ConfigError
    from ds_tune.rehearsed_trial import RehearsedWorld

    if launch:
        raise ConfigError(
            f"--links {args.links} with {' '.join(launch)}: a rehearsed trial is one process, which `ds run` does not start",
            code="tune-options",
            fix="Give --links and --world-size, or --nproc and --launch.",
        )
    return RehearsedWorld.of(args.links, args.world, args.nodes)


def _job(args: argparse.Namespace, what: tuple[Any, tuple[str, ...], tuple[str, ...]]) -> TrialRunner:
    from ds_config.errors import LaunchError
    from ds_tune.trial_runner import TrialRunner

    config, words, launch = what
    if "--module" not in launch and "-m" not in launch and not Path(args.script).is_file():
        raise LaunchError(
            f"there is no script {args.script}",
            code="tune-no-script",
            fix="Check the path; options of `ds tune` stand before the script.",
        )
    script_args = list(args.script_args)
    if not any(word in script_args for word in words) and args.config_option:
        script_args += [args.config_option, words[0]]
    limit = _positive("--time-limit", args.time_limit)
    return TrialRunner(
        config, words, launch, args.script, tuple(script_args), Path(args.results), Path(args.exps), limit, warmup=max(0, args.warmup)
    )  # fmt: skip


def _config_words(args: argparse.Namespace) -> tuple[tuple[str, ...], str]:
    """Find the words that name the configuration's file on the script's command line, and the file."""
    from ds_config.errors import ConfigError

    script_args = list(args.script_args)
    named = next(
        (script_args[i + 1] for i, w in enumerate(script_args[:-1]) if w in (args.config_option, _FLAG, "--deepspeed")),
        None,
    )
    named = named or next((w.partition("=")[2] for w in script_args if w.startswith(f"{_FLAG}=")), None)
    file = args.config or named
    if file is None:
        raise ConfigError(
            "no configuration was named",
            code="tune-config",
            fix="Give --config FILE, or the script's own --deepspeed_config FILE.",
        )
    return tuple(dict.fromkeys(word for word in (file, named) if word)), file


def _positive(name: str, value: Any) -> Any:
    from ds_config.errors import ConfigError

    if value <= 0:
        raise ConfigError(
            f"{name} is {value}; it must be more than 0", code="tune-options", fix="See `ds tune --help`."
        )
    return value


def _range_of(text: str) -> tuple[int, int]:
    from ds_config.errors import ConfigError

    low, _, high = text.partition(":")
    if not low.isdecimal() or not (high or low).isdecimal() or not 1 <= int(low) <= int(high or low):
        raise ConfigError(f"--micro is {text!r}; it is LOW:HIGH", code="tune-options", fix="For example --micro 1:64.")
    return int(low), int(high or low)


def _bytes_of(text: str | None) -> int | None:
    from ds_engine.memory_fit import size_of

    return None if text is None else size_of(text)


def devices_here() -> int:
    """Ranks that `ds run` starts when nobody says how many."""
    import os

    from ds_launcher.devices import find_devices

    return max(1, len(find_devices(dict(os.environ)).visible))


# ---- showing


def teller() -> Callable[[NextTrial, Result | None], None]:
    """Build a callback that reports each trial's start and end on standard error."""
    counter = [0]

    def tell(step: NextTrial, result: Result | None) -> None:
        if result is None:
            counter[0] += 1
            print(f"[{counter[0]:>2}] {step.candidate.name:<28} {step.why} ... ", end="", file=sys.stderr, flush=True)
        elif result.measured is None:
            print(f"{result.outcome} ({result.seconds:.0f} s)", file=sys.stderr, flush=True)
        else:
            peak = result.measured.peak_bytes / 2**20
            print(
                f"{result.measured.step_s * 1e3:.1f} ms, {peak:.0f} MiB ({result.seconds:.0f} s)",
                file=sys.stderr,
                flush=True,
            )

    return tell


def show(outcome: TuningResult, files: dict[str, str], request: TuningRequest, as_json: bool) -> None:
    from ds_config.errors import UnsupportedError
    from ds_tune.results_writer import left_text, rows_of
    from ds_tune.tuning_plot import draw

    rows = rows_of(outcome.candidates, outcome.results, outcome.known, request.metric)
    try:
        files["picture"] = str(draw(rows, Path(files["best"]).with_name("tune.svg"), "predicted and measured"))
    except UnsupportedError as error:
        if not as_json:
            print(f"no picture: {error.fix}")
    if outcome.best is None:
        return
    candidate, measured = outcome.best
    if as_json:
        report = {"best": dict(candidate.settings), "step_ms": measured.step_s * 1e3, "peak_bytes": measured.peak_bytes, "trials": rows,
                "left_out": [{"settings": dict(o.settings), "code": o.code, "reason": o.reason} for o in (*outcome.left, *outcome.known.left)],
                "candidates": len(outcome.candidates), "files": files}  # fmt: skip
        print(json.dumps(report, indent=1, default=str))
        return
    _table(rows)
    if outcome.left or outcome.known.left:
        print(
            f"left out of {len(outcome.candidates) + len(outcome.left)}:\n{left_text((*outcome.left, *outcome.known.left))}"
        )
    print(
        f"best of {len(outcome.candidates)}: {candidate.name}, {measured.step_s * 1e3:.1f} ms a step of {candidate.plan.batch}"
    )
    for what, path in files.items():
        print(f"  {what:<8} {path}")


def _table(rows: list[dict[str, Any]]) -> None:
    """Print the trials as a table, best last; with rich where installed."""
    cells = [
        (row["name"], str(row["rung"]), row["outcome"], *(_cell(row[key], scale) for key, scale in _COLUMNS))
        for row in sorted(rows, key=lambda row: -(row["measured_ms"] or 1e12))
    ]
    heads = ("trial", "rung", "outcome", "predicted ms", "measured ms", "predicted MiB", "measured MiB")
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        for line in (heads, *cells):
            print("  ".join(f"{word:>{14 if i else 28}}" for i, word in enumerate(line)))
        return
    table = Table(*heads, title="trials")
    for line in cells:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


_COLUMNS = (("predicted_ms", 1.0), ("measured_ms", 1.0), ("predicted_bytes", 2.0**-20), ("measured_bytes", 2.0**-20))


def _cell(value: float | None, scale: float) -> str:
    return "" if value is None else f"{value * scale:.1f}"


def _explain(tuning: Tuning, name: str, as_json: bool, job: TrialRunner) -> int:
    """Print the candidates and predictions without starting a trial."""
    from ds_config.did_you_mean import nearest
    from ds_config.errors import ConfigError
    from ds_tune.results_writer import explained, left_text

    tuning.resume()
    outcome = tuning.outcome()
    by_name = {c.name: c for c in outcome.candidates}
    if name and name not in by_name:
        near = nearest(name, by_name)
        raise ConfigError(
            f"there is no candidate {name!r}" + "".join(f"; did you mean {n}?" for n in near),
            code="tune-name",
            fix="`ds tune --explain` lists them.",
        )
    measured = {r.name: r.measured for r in outcome.results if r.measured is not None}
    shown = [by_name[name]] if name else outcome.candidates
    if as_json:
        descriptions = {
            c.name: {"settings": dict(c.settings), "states_bytes": c.plan.memory.total_bytes,
                     **({"memory": dict(p.memory), "time": dict(p.time)} if (p := outcome.known.predicted.get(c.name)) else {})}
            for c in shown
        }  # fmt: skip
        print(
            json.dumps(
                {"candidates": descriptions, "left_out": [{"code": o.code, "reason": o.reason} for o in outcome.left]},
                indent=1,
                default=str,
            )
        )
        return 0
    if outcome.known.numbers is None:
        print(f"nothing was measured yet in {job.results}; {len(outcome.candidates)} candidates:")
        print("\n".join(f"  {c.name:<28} {c.plan.batch}" for c in shown))
    else:
        order = sorted(shown, key=lambda c: outcome.known.predicted[c.name].step_s / c.plan.batch.train)
        for candidate in order if name else order[:5]:
            print(explained(candidate, outcome.known.predicted[candidate.name], measured.get(candidate.name)))
    if outcome.left or outcome.known.left:
        print(f"left out:\n{left_text((*outcome.left, *outcome.known.left))}")
    return 0


if __name__ == "__main__":
    from ds_config.ds_command import main as ds

    sys.exit(ds(["tune", *sys.argv[1:]]))
