"""The cipher of payloads: AES-256-GCM of the package ``cryptography``, which is an extra of disttensor's.

``seal`` and ``open`` work on memory that is there already: an AEAD that returned new bytes for each chunk would take
several times as long. The package is imported at the first connection that is encrypted.
"""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

from ..host.versions import LEAST_CIPHER, no_cipher_in
from ..protocol.errors import ProtocolError

#: The number of bytes by which sealed bytes are longer.
TAG = 16
#: The number of bytes of a nonce.
NONCE = 12


def no_cipher(load: bool = False) -> str:
    """Returns the reason why this process can't encrypt; empty if it can. The package is imported if ``load`` says so,
    else it is looked for."""
    version = ""
    if find_spec("cryptography") is not None:
        try:
            version = metadata.version("cryptography")
        except metadata.PackageNotFoundError:  # it was put there in another way
            version = str(LEAST_CIPHER)
    if why := no_cipher_in(version):
        return why
    try:
        if load:
            Cipher(bytes(32))
    except Exception as error:  # a library of the system's that it needs, say
        return f"the package cryptography does not work there: {' '.join(str(error).split())}"
    return ""


class Cipher:
    """AES-256-GCM under one key, whose nonces must not come again."""

    def __init__(self, key: bytes) -> None:
        """Raises ImportError where ``no_cipher`` says why."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._aead, self._wrong = AESGCM(key), InvalidTag

    def seal(self, nonce: bytes, plain: memoryview, out: memoryview) -> None:
        """Encrypts ``plain`` into ``out``, which is longer by TAG."""
        self._aead.encrypt_into(nonce, plain, None, out)

    def open(self, nonce: bytes, sealed: memoryview, out: memoryview) -> None:
        """Decrypts ``sealed`` into ``out``, which is shorter by TAG.

        Raises ProtocolError unless these are the bytes that were sealed; what is in ``out`` then means nothing.
        """
        try:
            self._aead.decrypt_into(nonce, sealed, None, out)
        except self._wrong:
            raise ProtocolError("its payload was altered on its way: the tag of its encryption is wrong") from None
