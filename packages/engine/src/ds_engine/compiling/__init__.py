"""Compiled training: the plan's actions as operations in the graphs of torch.compile.

graph, deciding, passes    pure: what passes know, what they decide, which ones run when
compiling                  pure: a configuration to a schedule of passes
ops, reading, rewriting    from a traced graph to what passes know, and back with actions in it
verbs, parking, joint      what operations do to a sharded model
moves, cutting, sequences  layers and sequences that are cut: collectives as operations, and batches in parts
frames, session            pieces of a model's forward as they are captured; the run
"""

from ds_engine.compiling.backends import Compiling, Shares, compiling_of
from ds_engine.compiling.graph import Graph, GraphAction, GraphVerb, Node, PassInputs
from ds_engine.compiling.schedule_passes import (
    BUILTIN,
    Contract,
    Pass,
    PassEntry,
    check_schedule,
    default_schedule,
    resolve,
)

__all__ = [
    "BUILTIN",
    "Compiling",
    "Contract",
    "Graph",
    "GraphAction",
    "GraphVerb",
    "Node",
    "Pass",
    "PassEntry",
    "PassInputs",
    "Shares",
    "check_schedule",
    "compiling_of",
    "default_schedule",
    "resolve",
]
