"""OpenPGP keys as apt takes them: their packets and fingerprints, without gpg, which a bare host lacks. Standard library only.

Source: RFC 9580, sections 4.2 (packet headers), 5.5.4 (fingerprints) and 6.2 (ASCII armor).
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator

from ansible.module_utils.aerie.errors import AerieError

PUBLIC_KEY = 6  # packet tag of a primary key; a subkey's is 14


def binary(key: bytes, where: str) -> bytes:
    """Return the packets of a key that may be armored."""
    if b"-----BEGIN PGP PUBLIC KEY BLOCK-----" not in key:
        if not key or not key[0] & 0x80:
            raise AerieError(f"{where}: this is no OpenPGP key (it begins with {key[:40]!r}); does the address serve something else?")
        return key
    packets = b""
    for block in re.findall(rb"-----BEGIN PGP PUBLIC KEY BLOCK-----\r?\n(.*?)-----END", key, re.DOTALL):
        lines = block.replace(b"\r", b"").split(b"\n")
        body = lines[lines.index(b"") + 1 :] if b"" in lines else lines
        try:
            packets += base64.b64decode(b"".join(line for line in body if not line.startswith(b"=")), validate=True)
        except ValueError as error:
            raise AerieError(f"{where}: the key's armor is damaged: {error}") from error
    return packets


def fingerprints(packets: bytes, where: str) -> list[str]:
    """Return the fingerprint of every primary key, in capital hexadecimal."""
    found = [_fingerprint(body, where) for tag, body in _packets(packets, where) if tag == PUBLIC_KEY]
    if not found:
        raise AerieError(f"{where}: no public key is in it")
    return found


def _fingerprint(body: bytes, where: str) -> str:
    if body[:1] == b"\x04":
        return hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body, usedforsecurity=False).hexdigest().upper()
    if body[:1] == b"\x06":
        return hashlib.sha256(b"\x9b" + len(body).to_bytes(4, "big") + body).hexdigest().upper()
    raise AerieError(f"{where}: a key of version {body[0] if body else '?'}, and 4 or 6 is known")


def _packets(data: bytes, where: str) -> Iterator[tuple[int, bytes]]:
    place = 0
    try:
        while place < len(data):
            head = data[place]
            place += 1
            if head & 0x40:
                tag, first = head & 0x3F, data[place]
                if first < 192:
                    length, place = first, place + 1
                elif first < 224:
                    length, place = ((first - 192) << 8) + data[place + 1] + 192, place + 2
                elif first == 255:
                    length, place = int.from_bytes(data[place + 1 : place + 5], "big"), place + 5
                else:
                    raise AerieError(f"{where}: a packet in parts, which no key has")
            else:
                tag, size = (head >> 2) & 0x0F, {0: 1, 1: 2, 2: 4}[head & 0x03]
                length, place = int.from_bytes(data[place : place + size], "big"), place + size
            if place + length > len(data):
                raise AerieError(f"{where}: the key is cut off")
            yield tag, data[place : place + length]
            place += length
    except (IndexError, KeyError) as error:
        raise AerieError(f"{where}: the key is damaged") from error
