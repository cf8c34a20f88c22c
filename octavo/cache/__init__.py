"""⑥ Page bookkeeping: who owns which KV page.
Knows nothing of tensors: pages are integers."""

from octavo.cache.audit import audit
from octavo.cache.kv_cache import Admission, Growth, KVCache, PageTable, Transfer
from octavo.cache.pool import PagePool

__all__ = ["Admission", "Growth", "KVCache", "PagePool", "PageTable", "Transfer", "audit"]
