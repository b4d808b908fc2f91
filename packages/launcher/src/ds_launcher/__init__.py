"""The `ds` command line, and a launcher that leaves no process behind."""
