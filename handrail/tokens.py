"""Approval tokens: how one is made and read, and the secret that signs it.

A token is signed text that names one request and what was shown of it; the ledger knows it by a
hash of its nonce alone. Who signs is known here, and decides nothing.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from itsdangerous import BadSignature, URLSafeSerializer

from handrail.agent.approvals import Approval, ApprovalRefused, Token
from handrail.agent.people import Role
from handrail.errors import BadInput
from handrail.ledger.database import Database
from handrail.settings import SHORTEST_SECRET

_SALT: Final = "handrail.approval"
KEY_SUFFIX: Final = ".approval.key"


@dataclass(eq=False)
class NoSecret(BadInput):
    """Approval tokens cannot be signed here."""

    code: ClassVar[str] = "no-approval-secret"

    def __str__(self) -> str:
        return (
            f"set HANDRAIL_APPROVAL_SECRET to a random text of at least {SHORTEST_SECRET}"
            " characters, the same for all processes of this fleet (a list, the newest first,"
            " separated by commas, lets old tokens live on)"
        )


@dataclass(eq=False)
class UnusableKey(BadInput):
    """The file with the key that signs approval tokens holds none; nothing was signed."""

    code: ClassVar[str] = "approval-key-unusable"
    path: str
    problem: str

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.problem}. Remove it, and a new key is made (tokens that were"
            " issued before count no more), or set HANDRAIL_APPROVAL_SECRET"
        )


def secrets_of(given: str, database: Database, own_secret: str) -> Sequence[str]:
    """The secrets of a deployment, the newest first: those that were given; without any, the key
    beside a ledger file, or `own_secret` where no other process can see the ledger. Raises
    `NoSecret`, `UnusableKey`.
    """
    named = [one.strip() for one in given.split(",") if one.strip()]
    if named:
        return named
    if database.postgres:
        raise NoSecret
    if database.in_memory:
        return [own_secret]
    return [_kept_key(key_file(database))]


def key_file(database: Database) -> Path:
    """Where the key of a ledger file is: beside it, by whichever name the file was given."""
    file = Path(str(database.url.database)).resolve()  # a link leads to the same key
    return file.with_name(file.name + KEY_SUFFIX)


def signer(secrets_given: Sequence[str]) -> URLSafeSerializer:
    """What signs with the newest secret, and knows the signatures of all."""
    return URLSafeSerializer(
        [*reversed(secrets_given)],
        salt=_SALT,
        signer_kwargs={"key_derivation": "hmac", "digest_method": hashlib.sha256},
    )


def new_token(approval: Approval, signs: URLSafeSerializer) -> tuple[str, str]:
    """Make a token for exactly this request; returns it, and the hash by which it is known."""
    nonce = secrets.token_urlsafe(32)
    payload = {"a": approval.id, "d": approval.digest, "r": Role.APPROVER.value, "n": nonce}
    return str(signs.dumps(payload)), _hash(nonce)


def read_token(text: object, signs: URLSafeSerializer) -> Token:
    """Check a token's signature, and read it. Raises `ApprovalRefused`."""
    if not isinstance(text, str) or not text.isascii():
        raise ApprovalRefused(
            "unbound", "a consent names exactly one action: give the token issued for it"
        )
    try:
        read = signs.loads(text)
        approval_id, digest, role, nonce = (str(read[key]) for key in "adrn")
    except (BadSignature, KeyError, TypeError):
        raise ApprovalRefused(
            "unbound", "that is no token of this fleet: it names no action to consent to"
        ) from None
    return Token(approval_id, digest, role, _hash(nonce))


def _hash(nonce: str) -> str:
    return hashlib.sha256(nonce.encode()).hexdigest()


def _kept_key(path: Path) -> str:
    """The key in a file, made at its first use: nobody but its owner may read it."""
    try:
        if not path.exists():
            _make_key(path)
        kept = path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableKey(str(path), f"it cannot be read ({type(error).__name__})") from error
    if len(kept) < SHORTEST_SECRET:
        raise UnusableKey(str(path), f"it holds less than {SHORTEST_SECRET} characters")
    return kept


def _make_key(path: Path) -> None:
    written, ours = tempfile.mkstemp(dir=path.parent)  # readable for nobody else
    with open(written, "w") as file:
        file.write(secrets.token_urlsafe(48))
    with suppress(FileExistsError):  # another process was faster, and is right
        os.link(ours, path)
    os.unlink(ours)


__all__ = [
    "KEY_SUFFIX",
    "NoSecret",
    "UnusableKey",
    "key_file",
    "new_token",
    "read_token",
    "secrets_of",
    "signer",
]
