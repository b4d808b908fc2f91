"""What only the processes of a job know, and how they prove that a text is theirs."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping

__all__ = ["SECRET_VARIABLE", "job_secret", "new_secret", "seal"]

SECRET_VARIABLE = "DS_JOB_SECRET"


def new_secret() -> str:
    """Generate a random secret of 128 bits, in hex."""
    return secrets.token_hex(16)


def job_secret(env: Mapping[str, str] = os.environ) -> bytes:
    """Return the job's secret from the environment, set by launcher or rendezvous; empty if there is none."""
    return env.get(SECRET_VARIABLE, "").encode()


def seal(secret: bytes, name: str, text: str) -> str:
    """Compute an authentication code (HMAC) of this text under this name, for holders of the secret."""
    return hmac.new(secret, f"{name}\0{text}".encode(), hashlib.sha256).hexdigest()[:32]
