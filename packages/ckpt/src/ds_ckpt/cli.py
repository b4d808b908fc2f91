"""`ds ckpt`: inspect checkpoints, verify them, compare them, and convert them to other formats."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_config.errors import CheckpointError, DsError
from ds_config.regular_file import read_regular_text
from ds_config.sizes import parse_bytes

if TYPE_CHECKING:
    from ds_ckpt.convert.tensor_source import TensorSource
    from ds_ckpt.records import Manifest

__all__ = ["HELP", "main", "register"]

HELP = "inspect, verify, convert, compare and export checkpoints"
_PATH = "a checkpoint, or a directory of checkpoints (the newest is taken)"
_FORMATS = ("ds", "hf", "dcp", "deepspeed")
_MAX_INFO_BYTES = 2**24


def register(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands to the parser of `ds ckpt`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    one = actions.add_parser("inspect", help="what a checkpoint holds, without reading tensor data")
    one.add_argument("path", help="a checkpoint, or a directory of checkpoints")
    one.add_argument("--json", action="store_true", help="machine-readable")
    one.add_argument("--tensors", action="store_true", help="list every tensor")
    check = actions.add_parser("verify", help="read every byte and prove it; exit status 1 when something is damaged")
    check.add_argument("path", help=_PATH)
    check.add_argument("--json", action="store_true", help="machine-readable")
    compare = actions.add_parser("diff", help="compare as logical tensors; exit status 1 when they differ")
    compare.add_argument("first", help=_PATH)
    compare.add_argument("second", help=_PATH)
    compare.add_argument("--json", action="store_true", help="machine-readable")
    export = actions.add_parser("export", help="model weights as Hugging Face safetensors")
    export.add_argument("path", help=_PATH)
    export.add_argument("out", help="folder to write")
    export.add_argument("--dtype", help="convert floating-point tensors (float32, bfloat16, float16, ...)")
    export.add_argument("--max-shard-size", default="5GB", help="of one file (default: 5GB)")
    export.add_argument("--exclude-frozen", action="store_true", help="leave out parameters without optimizer state")
    export.add_argument("--json", action="store_true", help="machine-readable")
    convert = actions.add_parser("convert", help="from one format to another")
    convert.add_argument("source", help=f"{_PATH}; with --from another format, its folder")
    convert.add_argument("out", help="checkpoint or folder to write")
    convert.add_argument("--from", dest="source_format", choices=_FORMATS, required=True, help="format of the source")
    convert.add_argument("--to", dest="out_format", choices=_FORMATS, required=True, help="format to write")
    convert.add_argument("--tag", default="converted", help="tag of a deepspeed output (default: converted)")
    convert.add_argument(
        "--stage", type=int, choices=(1, 2, 3), help="deepspeed output: as ZeRO writes it, not universal"
    )
    convert.add_argument("--ranks", type=int, default=1, help="with --stage: data-parallel ranks (default: 1)")
    convert.add_argument("--module-dtype", default="float32", help="with --stage: of the model (default: float32)")
    convert.add_argument("--experts", type=int, default=1, help="with --stage: ranks that share experts (default: 1)")
    convert.add_argument(
        "--pipeline", type=int, nargs="+", default=[], help="with --stage 1: first layer of each stage"
    )
    convert.add_argument(
        "--allow-pickle", action="store_true", help="dcp and deepspeed inputs can be written to run code"
    )
    convert.add_argument(
        "--parallel-info", help="JSON file: how tensor-parallel parts join, where deepspeed inputs do not say it"
    )
    convert.add_argument("--json", action="store_true", help="machine-readable")


def main(args: argparse.Namespace) -> int:
    """Run one subcommand. Exit status: 0 fine, 1 damaged or different, 2 an error."""
    try:
        return _ACTIONS[args.action](args)
    except DsError as error:
        print(error, file=sys.stderr)
        return 1 if args.action == "verify" else 2


def _inspect(args: argparse.Namespace) -> int:
    from ds_ckpt.checkpoint_list import (  # here and below: they import torch; `ds ckpt --help` must not
        inspect,
        list_tags,
    )
    from ds_ckpt.manifest_owner import has_manifest

    if "://" not in args.path and not has_manifest(args.path) and list_tags(args.path):
        rows = [(tag, inspect(os.path.join(args.path, tag))) for tag in list_tags(args.path)]
        if args.json:
            print(json.dumps([{"tag": tag, **_summary(m)} for tag, m in rows]))
        for tag, manifest in rows if not args.json else ():
            print(f"{tag:24} {_line(manifest)}")
        return 0
    manifest = inspect(args.path)
    if args.json:
        tensors = {
            name: {"dtype": record.dtype, "shape": record.shape, "pieces": sum(len(p.pieces) for p in record.parts)}
            for name, record in manifest.tensors.items()
        }
        listed = {"all_tensors": tensors, "all_aliases": dict(manifest.aliases)} if args.tensors else {}
        print(json.dumps({**_summary(manifest), "meta": manifest.meta, **listed}))
        return 0
    print(_line(manifest))
    print(f"meta: {', '.join(sorted(manifest.meta)) or 'none'}")
    for name, record in manifest.tensors.items() if args.tensors else ():
        print(f"  {name}  {record.dtype}{list(record.shape)}  {sum(len(p.pieces) for p in record.parts)} pieces")
    for alias, name in manifest.aliases.items() if args.tensors else ():
        print(f"  {alias} = {name}")
    return 0


def _summary(m: Manifest) -> dict[str, object]:
    return {
        "sequence": m.sequence,
        "created": m.created,
        "files": len(m.files),
        "tensors": len(m.tensors),
        "aliases": len(m.aliases),
        "nbytes": m.nbytes,
    }


def _line(m: Manifest) -> str:
    return f"#{m.sequence}  {m.created}  {len(m.tensors)} tensors  {m.nbytes / 1e6:.1f} MB  {len(m.files)} files"


def _verify(args: argparse.Namespace) -> int:
    from ds_ckpt.check import verify

    report = verify(_checkpoint(args.path))
    if args.json:
        print(json.dumps(asdict(report)))
        return 0
    print(f"sound: {report.num_files} files, {report.num_blocks} blocks, {report.nbytes} bytes")
    return 0


def _diff(args: argparse.Namespace) -> int:
    from ds_ckpt.check import diff

    differences = diff(_checkpoint(args.first), _checkpoint(args.second))
    if args.json:
        print(json.dumps({"equal": not differences, **asdict(differences)}))
        return int(bool(differences))
    for title, names in (
        ("only in the first", differences.only_first),
        ("only in the second", differences.only_second),
        ("other shape or dtype", differences.kind),
        ("other values", differences.values),
        ("other meta", differences.meta),
    ):
        for name in names:
            print(f"{title}: {name}")
    if not differences:
        print("equal")
    return int(bool(differences))


def _export(args: argparse.Namespace) -> int:
    from ds_ckpt.convert.fp32 import weights
    from ds_ckpt.convert.huggingface import write_hf
    from ds_ckpt.convert.tensor_source import cast, open_checkpoint

    model = weights(open_checkpoint(_checkpoint(args.path)), exclude_frozen_parameters=args.exclude_frozen)
    done = write_hf(
        cast(model, args.dtype) if args.dtype else model, args.out, max_shard_bytes=_bytes(args.max_shard_size)
    )
    if args.json:
        print(json.dumps({"out": args.out, **asdict(done)}))
        return 0
    print(f"{args.out}: {len(done.files)} files, {done.nbytes} bytes")
    return 0


def _convert(args: argparse.Namespace) -> int:
    from ds_ckpt.convert.dcp import write_dcp
    from ds_ckpt.convert.deepspeed_layout import write_universal
    from ds_ckpt.convert.fp32 import weights
    from ds_ckpt.convert.huggingface import write_hf
    from ds_ckpt.convert.regular import Regular, write_regular
    from ds_ckpt.convert.tensor_source import write_checkpoint

    source = _open(args.source, args.source_format, args.allow_pickle, args.parallel_info)
    left_out = list(source.meta.get("left_out", ()))
    if args.out_format == "ds":
        written = [write_checkpoint(source, args.out).path]
    elif args.out_format == "hf":
        written = list(write_hf(weights(source), args.out).files)
    elif args.out_format == "dcp":
        left_out += write_dcp(source, args.out)
        written = [args.out]
    elif args.stage is None:
        written = [str(write_universal(source, args.out, args.tag, allow_pickle=args.allow_pickle))]
    else:
        cut = Regular(args.stage, args.ranks, args.module_dtype, None, args.experts, tuple(args.pipeline))
        written = [str(write_regular(source, args.out, args.tag, cut, allow_pickle=args.allow_pickle))]
    if args.json:
        print(json.dumps({"written": written, "left_out": left_out}))
        return 0
    print(", ".join(written))
    for name in left_out:
        print(f"left out: {name}", file=sys.stderr)
    return 0


def _open(path: str, form: str, allow_pickle: bool, parallel_info: str | None) -> TensorSource:
    from ds_ckpt.convert.dcp import open_dcp
    from ds_ckpt.convert.deepspeed_layout import open_deepspeed
    from ds_ckpt.convert.huggingface import open_hf
    from ds_ckpt.convert.tensor_source import open_checkpoint, renamed

    if form == "ds":
        return open_checkpoint(_checkpoint(path))
    if form == "hf":
        return renamed(open_hf(path), lambda name: f"param/{name}")
    if form == "dcp":
        return open_dcp(path, allow_pickle=allow_pickle)
    info = None if parallel_info is None else _object(parallel_info)
    return open_deepspeed(path, allow_pickle=allow_pickle, parallel_info=info)


def _object(file: str) -> dict[str, Any]:
    try:
        value = json.loads(read_regular_text(file, _MAX_INFO_BYTES))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}", code="ckpt-not-found", fix="Give a file with a JSON object."
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} has no JSON object", code="ckpt-not-found", fix="Give a file with one.")
    return value


def _checkpoint(path: str) -> str:
    """Return the path of a checkpoint: `path` itself, or the newest checkpoint in that directory.

    Raises:
        CheckpointError: there is no such directory, or it holds no checkpoint ("ckpt-not-found").
    """
    from ds_ckpt.checkpoint_list import find_latest
    from ds_ckpt.manifest_owner import has_manifest

    if "://" in path or has_manifest(path):
        return path
    if not Path(path).is_dir():
        raise CheckpointError(
            f"there is no directory {path} (working directory: {os.getcwd()})",
            code="ckpt-not-found",
            fix="Check the path.",
        )
    newest = find_latest(path)
    if newest is None:
        raise CheckpointError(
            f"{path} is no checkpoint, and no directory with a complete one",
            code="ckpt-not-found",
            fix="Give a checkpoint, or the directory that a job saves into; one of another format needs `ds ckpt convert --from`.",
        )
    return str(newest)


def _bytes(text: str) -> int:
    try:
        return max(1, parse_bytes(text))
    except ValueError as error:
        raise CheckpointError(str(error), code="ckpt-size", fix="Write 5GB, 500MB or a number of bytes.") from error


_ACTIONS = {"inspect": _inspect, "verify": _verify, "diff": _diff, "export": _export, "convert": _convert}


if __name__ == "__main__":
    from ds_config.ds_command import main as ds

    sys.exit(ds(["ckpt", *sys.argv[1:]]))
