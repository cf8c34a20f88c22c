"""The part that needs llama.cpp, run by the interpreter that has llama_cpp: its version, its conversions, its losses.
That interpreter need not have Octavo. Prints one JSON line.

python llama_side.py version
python llama_side.py ends FILE               ids at which llama.cpp stops by itself
python llama_side.py convert FROM TO TYPE THREADS
python llama_side.py losses FILE THREADS     token ids as JSON lists on stdin; the summed -log p of all but each list's first"""

import ctypes
import json
import os
import sys

import llama_cpp
import numpy as np

TYPES = {"f32": llama_cpp.LLAMA_FTYPE_ALL_F32, "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0}


def ends(path: str) -> list[int]:
    model = llama_cpp.Llama(path, vocab_only=True, verbose=False)
    vocabulary = llama_cpp.llama_model_get_vocab(model.model)
    return [i for i in range(model.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocabulary, i)]


def convert(source: str, target: str, name: str, num_threads: int) -> int:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = TYPES[name], num_threads, True
    part = f"{target}.{os.getpid()}.part"
    code: int = llama_cpp.llama_model_quantize(source.encode(), part.encode(), ctypes.byref(params))
    if code == 0:
        os.replace(part, target)  # an interrupted conversion must not look complete
    return code


def losses(path: str, num_threads: int) -> list[float]:
    windows: list[list[int]] = json.load(sys.stdin)
    longest = max(map(len, windows))
    model = llama_cpp.Llama(
        path,
        n_ctx=longest,
        n_batch=longest,
        n_ubatch=longest,
        n_threads=num_threads,
        n_threads_batch=num_threads,
        logits_all=True,
        verbose=False,
    )
    found = []
    for window in windows:
        model.reset()
        model.eval(window)
        logits = model.scores[: len(window) - 1].astype(np.float64)  # [T - 1, V]
        largest = logits.max(axis=1, keepdims=True)
        log_sums = np.log(np.exp(logits - largest).sum(axis=1)) + largest[:, 0]
        found.append(float((log_sums - logits[np.arange(len(window) - 1), window[1:]]).sum()))
    return found


def main(what: str, *rest: str) -> object:
    match what, rest:
        case "version", ():
            return llama_cpp.__version__
        case "ends", (path,):
            return ends(path)
        case "convert", (source, target, name, threads):
            return convert(source, target, name, int(threads))
        case "losses", (path, threads):
            return losses(path, int(threads))
    raise SystemExit(__doc__)


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
