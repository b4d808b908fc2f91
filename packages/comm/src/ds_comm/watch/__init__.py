"""What ends silent hangs: every operation is stamped, waits are watched, and where ranks differ each says what it sees."""
