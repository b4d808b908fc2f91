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
    """One that nobody guesses."""
    return secrets.token_hex(16)


def job_secret(env: Mapping[str, str] = os.environ) -> bytes:
    """The job's, as its launcher or its rendezvous left it in the environment; empty where there is none."""
    return env.get(SECRET_VARIABLE, "").encode()


def seal(secret: bytes, name: str, text: str) -> str:
    """A code that only who knows the secret can make for this text in this place."""
    return hmac.new(secret, f"{name}\0{text}".encode(), hashlib.sha256).hexdigest()[:32]
