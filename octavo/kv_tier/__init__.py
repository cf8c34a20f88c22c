"""KV pages in files: runs of pages that name and check themselves, in a folder that several engines may share. Bytes in, bytes out."""
