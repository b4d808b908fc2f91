"""Token files, and an order of samples that survives any restart; curricula, token dropping, dynamic batches."""

from ds_data.checking import Report, check_tokens
from ds_data.codes import fitting
from ds_data.index import Index, pack_index, parse_index
from ds_data.tokens import TokenFile
from ds_data.writing import TokenWriter, write_items

__all__ = [
    "Index",
    "Report",
    "TokenFile",
    "TokenWriter",
    "check_tokens",
    "fitting",
    "pack_index",
    "parse_index",
    "write_items",
]
