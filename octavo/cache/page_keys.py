"""Keys of pages: a hash chain over a prompt's tokens, from a root. Caches with the same root give the same pages the same keys, so a
router that has the root can tell from a prompt which of its pages a cache holds."""

from array import array
from hashlib import blake2b

KEY_BYTES = 16


def page_key(parent: bytes, content: bytes) -> bytes:
    """Key of the page that follows the page with key `parent` (the first follows the root) and holds `content`: its token ids, eight
    bytes each. A cryptographic hash, so that a client cannot craft a prompt that finds another prompt's pages."""
    return blake2b(parent + content, digest_size=KEY_BYTES).digest()


def keys_of(root: bytes, tokens: list[int], page_size: int) -> list[bytes]:
    """Keys of the pages of a prompt that a cache may already hold: the full ones, without the last token, which is always computed, to
    sample after it."""
    content = array("q", tokens).tobytes()
    step = 8 * page_size
    keys, key = [], root
    for start in range(0, (len(tokens) - 1) // page_size * step, step):
        key = blake2b(
            key + content[start : start + step], digest_size=KEY_BYTES
        ).digest()  # page_key(), inlined: it is most of a routing decision
        keys.append(key)
    return keys


def adapter_root(root: bytes, adapter: str) -> bytes:
    """The root for sequences with this adapter, whose keys and values differ. `adapter`: a digest of its content; empty: none."""
    return (
        blake2b(adapter.encode(), key=root, digest_size=KEY_BYTES, person=b"octavo adapter").digest()
        if adapter
        else root
    )


def fleet_root(secret: bytes, fingerprint: str, salt: bytes = b"") -> bytes:
    """The root that all replicas of one fingerprint share. `secret`: the fleet's, of 16 to 64 bytes; without it a key reveals nothing about
    its tokens, and no prompt can be crafted to collide. Replicas of another fingerprint, whose keys and values differ, have another root.
    `salt`: separates tenants; prompts with different salts share no key, on any replica."""
    if not 16 <= len(secret) <= 64:
        raise ValueError(f"the secret has {len(secret)} bytes; it must have 16 to 64")
    root = blake2b(fingerprint.encode(), key=secret, digest_size=KEY_BYTES, person=b"octavo pages").digest()
    return blake2b(salt, key=root, digest_size=KEY_BYTES, person=b"octavo tenant").digest() if salt else root
