"""What ends silent hangs: every operation is stamped, waits are watched, and where ranks part each says what it sees."""
