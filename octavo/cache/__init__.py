"""Bookkeeping of KV pages: which sequences own which page. Pages are integers; the tensors are the worker's."""

from octavo.cache.audit import audit
from octavo.cache.kv_cache import Admission, Growth, KVCache, PageTable, Transfer
from octavo.cache.pool import PagePool

__all__ = ["Admission", "Growth", "KVCache", "PagePool", "PageTable", "Transfer", "audit"]
